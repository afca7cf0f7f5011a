"""Tensors of the strides that PyTorch's own results have."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def has_strides(tensor: torch.Tensor, strides: Sequence[int]) -> bool:
    """Whether a tensor has these strides. Strides of dimensions with one element mean nothing and are not compared."""
    found = tensor.stride()
    return found == strides or all(
        size < 2 or have == want for size, have, want in zip(tensor.shape, found, strides, strict=True)
    )


def in_strides(tensor: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """The tensor itself if it has these strides, else a copy that has."""
    if tensor.stride() == strides:
        return tensor
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def in_known_strides(tensors: list[torch.Tensor], strides: Sequence[Sequence[int] | None]) -> list[torch.Tensor]:
    """Tensors with the strides that are known of them (not None); strides may be fewer than the tensors."""
    found = list(tensors)
    for index, wanted in enumerate(strides):
        if wanted is not None and not has_strides(found[index], wanted):
            found[index] = in_strides(found[index], tuple(wanted))
    return found
