"""Tensors of other sizes that lie in memory as a given one does: its dimensions in the same order, without gaps."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def strides_as(shape: Sequence[int], like: torch.Tensor) -> tuple[int, ...]:
    """Dense strides of a shape with the dimensions in the order of another tensor's strides; contiguous if that is expanded."""
    order = list(range(len(shape)))
    if all(like.stride()):
        # The stride of a dimension with one entry means nothing; that of a single image is the largest.
        order.sort(key=lambda dim: (dim != 0 or like.shape[0] > 1, -like.stride(dim), dim))
    strides, step = [1] * len(shape), 1
    for dim in reversed(order):
        strides[dim] = step
        step *= max(1, shape[dim])
    return tuple(strides)


def laid_out_as(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The tensor, copied if it does not lie in memory as another one of as many dimensions does."""
    strides = strides_as(tensor.shape, like)
    if tensor.stride() == strides:
        return tensor
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def empty_joined(part: torch.Tensor, images: int) -> torch.Tensor:
    """An uninitialized tensor for the results of all images, laid out as the results of some of them."""
    shape = (images, *part.shape[1:])
    return torch.empty_strided(shape, strides_as(shape, part), dtype=part.dtype, device=part.device)
