"""Scratch: named tensors laid out one after another in the workspace that a launch is given."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

ALIGNMENT = 256
"""Bytes that every tensor's start is a multiple of; the caller promises it for the workspace's start."""


class Scratch:
    """The layout of a workspace: tensors one after another. `views` costs a slice and a reshape per tensor."""

    def __init__(self) -> None:
        self._pieces: list[tuple[int, int, torch.dtype, tuple[int, ...]]] = []
        self.size_bytes = 0

    def add(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Append a dense, row-major tensor."""
        size = math.prod(shape) * dtype.itemsize
        self._pieces.append((self.size_bytes, size, dtype, tuple(shape)))
        self.size_bytes += -(-size // ALIGNMENT) * ALIGNMENT

    def views(self, workspace: torch.Tensor | None) -> list[torch.Tensor]:
        """The tensors, in the order of `add`, in a flat uint8 tensor of at least `size_bytes`; None where that is 0."""
        if workspace is None:
            workspace = torch.empty(0, dtype=torch.uint8)
        return [workspace[at : at + size].view(dtype).view(shape) for at, size, dtype, shape in self._pieces]
