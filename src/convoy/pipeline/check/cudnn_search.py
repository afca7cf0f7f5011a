"""How long cuDNN searches for the algorithms of PyTorch's convolutions where a first answer is wanted."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Final

import torch

from convoy.engines.torch_flags import HeldFlag

FEW_PLANS: Final = 3
"""Plans of cuDNN that a brief search times for each convolution, of PyTorch's 10."""

_FEW: Final = HeldFlag(lambda: torch.backends.cudnn, "benchmark_limit", FEW_PLANS)


def cudnn_search(device: torch.device, *, brief: bool) -> AbstractContextManager[object]:
    """A context in which cuDNN tries few plans for each of PyTorch's convolutions if `brief` is set.

    A search loads every kernel that it tries. PyTorch keeps the plan that is found, so later calls in this process run it too.
    Who has turned PyTorch's own searches on (`torch.backends.cudnn.benchmark`) gets whole ones.

    Args:
        device: where the convolutions run; nothing changes but on CUDA.
        brief: whether the caller waits for a first answer.
    """
    if device.type != "cuda" or not brief or torch.backends.cudnn.benchmark:
        return nullcontext()
    return _FEW.held()
