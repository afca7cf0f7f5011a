"""NumPy arrays as tensors, with a type that checkers know."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray


def as_tensor(array: NDArray[Any]) -> torch.Tensor:
    """The array's memory as a tensor on the CPU; nothing is copied."""
    return torch.from_numpy(array)  # pyright: ignore[reportUnknownMemberType] - PyTorch's stub leaves the array's type open
