"""ResultLayout: how PyTorch's own results lie in memory, so that a plan's results can lie alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from convoy.errors import CaptureError
from convoy.tensor_strides import in_strides


@dataclass(frozen=True, slots=True)
class ResultView:
    """A result that lies in another result's memory.

    Attributes:
        base: index of the result that all of the memory belongs to.
        shape: of the view.
        stride: likewise.
        offset: elements from the start of the base's memory.
    """

    base: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class ResultLayout:
    """Strides of results, and which are views of others.

    Attributes:
        strides: one a result; None where it is no tensor, a view, or expanded: such a result stays as it was made.
        views: by index of the result.
    """

    strides: tuple[tuple[int, ...] | None, ...]
    views: dict[int, ResultView]

    def __call__(self, made: Sequence[Any]) -> list[Any]:
        """A plan's results, laid out like PyTorch's; results behind the last that is described stay as they are."""
        found = list(made)
        for index, stride in enumerate(self.strides):
            if stride is not None:
                found[index] = in_strides(found[index], stride)
        for index, view in self.views.items():
            base = found[view.base]
            found[index] = base.as_strided(view.shape, view.stride, base.storage_offset() + view.offset)
        return found


def layout_of(results: Sequence[Any]) -> ResultLayout:
    """The layout of results, real or fake ones.

    Raises:
        CaptureError: results share memory in a way that cannot be made again.
    """
    groups: dict[int, list[int]] = {}
    for index, value in enumerate(results):
        if isinstance(value, torch.Tensor) and value.numel():
            groups.setdefault(value.untyped_storage()._cdata, []).append(index)
    views: dict[int, ResultView] = {}
    for members in groups.values():
        base = next((index for index in members if _is_whole(results[index])), None)
        if len(members) == 1:
            continue
        if base is None or len({results[index].dtype for index in members}) > 1:
            raise CaptureError("results share memory, and none of them is all of it")
        for index in members:
            if index != base:
                value = results[index]
                views[index] = ResultView(base, tuple(value.shape), tuple(value.stride()), value.storage_offset())
    strides = (
        tuple(value.stride())
        if isinstance(value, torch.Tensor) and index not in views and not _overlaps(value)
        else None
        for index, value in enumerate(results)
    )
    return ResultLayout(tuple(strides), views)


def _is_whole(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements are all that its memory holds, each once."""
    dense = torch.ops.aten.is_non_overlapping_and_dense(tensor)
    return bool(dense) and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def _overlaps(tensor: torch.Tensor) -> bool:
    """Whether it is expanded: elements of one address cannot be written one by one."""
    return any(stride == 0 and side > 1 for side, stride in zip(tensor.shape, tensor.stride(), strict=True))
