"""DynamicDims: which dimensions of a model's inputs may change, and within which ranges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from convoy.dynamic.layouts import laid_out_as
from convoy.plan import SizeRange
from convoy.program.calls import map_tensors

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments, in the example's form."""


@dataclass(frozen=True, slots=True)
class DynamicDims:
    """All ranges, and the shapes of the example's tensors.

    Attributes:
        ranges: that of the batch first, where there is one.
        shapes: of the example's tensors, in order.
    """

    ranges: tuple[SizeRange, ...]
    shapes: tuple[tuple[int, ...], ...]

    @property
    def batch(self) -> SizeRange | None:
        """The range of the batch; None if its size is fixed."""
        return self.ranges[0] if self.ranges[0].is_batch else None

    @property
    def example(self) -> tuple[int, ...]:
        """The example's sizes, one for each range."""
        return tuple(one.example for one in self.ranges)

    def sizes_of(self, tensors: Sequence[torch.Tensor]) -> tuple[int, ...] | None:
        """The sizes of a call, one for each range; None if it differs from the example in something else."""
        if len(tensors) != len(self.shapes):
            return None
        free = {place for one in self.ranges for place in one.places}
        for index, (tensor, shape) in enumerate(zip(tensors, self.shapes, strict=True)):
            if tensor.dim() != len(shape):
                return None
            if any(tensor.shape[dim] != size and (index, dim) not in free for dim, size in enumerate(shape)):
                return None
        found = [{int(tensors[index].shape[dim]) for index, dim in one.places} for one in self.ranges]
        return tuple(sizes.pop() for sizes in found) if all(len(sizes) == 1 for sizes in found) else None

    def outside(self, sizes: Sequence[int]) -> str:
        """Which size is out of its range, in words; empty if none is."""
        for one, size in zip(self.ranges, sizes, strict=True):
            if not one.least <= size <= one.most:
                return f"{one.name} is {size}, outside of {one.least} to {one.most}"
        return ""

    def resized(self, call: Call, sizes: Sequence[int]) -> Call:
        """A call in the example's form with other sizes: images, rows and columns are repeated or left out at the end."""
        wanted: dict[int, dict[int, int]] = {}
        for one, size in zip(self.ranges, sizes, strict=True):
            for index, dim in one.places:
                wanted.setdefault(index, {})[dim] = size
        numbers = iter(range(len(self.shapes)))
        return map_tensors(lambda tensor: _resized(tensor, wanted.get(next(numbers), {})), call)

    def images(self, call: Call, start: int, count: int, padded: int) -> Call:
        """Some images of a call in the example's form; the last one is repeated until there are `padded`."""
        assert self.batch is not None
        batched = {index for index, _ in self.batch.places}
        numbers = iter(range(len(self.shapes)))

        def part(tensor: torch.Tensor) -> torch.Tensor:
            if next(numbers) not in batched:
                return tensor
            some = tensor.narrow(0, start, count)
            if padded == count:
                return some
            last = some.narrow(0, count - 1, 1).expand(padded - count, *some.shape[1:])
            return laid_out_as(torch.cat((some, last)), some)

        return map_tensors(part, call)


def _resized(tensor: torch.Tensor, sizes: Mapping[int, int]) -> torch.Tensor:
    made = tensor
    for dim, size in sizes.items():
        if made.shape[dim] != size:
            made = made.index_select(dim, torch.arange(size, device=tensor.device) % tensor.shape[dim])
    return made if made is tensor else laid_out_as(made, tensor)
