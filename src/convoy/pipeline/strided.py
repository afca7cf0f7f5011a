"""strided: results with the strides that PyTorch's own have."""

from __future__ import annotations

import torch


def strided(tensor: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """The tensor with these strides, dense ones: itself where it has them, else a copy."""
    if tensor.stride() == stride:
        return tensor
    return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
