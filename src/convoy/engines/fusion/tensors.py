"""The values of a subgraph as expressions of one another: what a kernel computes at a position of a result.

An operator of the graph becomes one or more of these (`lowering`); `kernel_code` turns them into CUDA C.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from convoy.engines.fusion.index_math import Index, joined, number, taken_apart

Coordinates = tuple[Index, ...]


class NotFusibleError(Exception):
    """A subgraph that no kernel of this package computes; the message says why."""


@dataclass(frozen=True, eq=False)
class Tensor:
    """A value.

    Attributes:
        shape: its logical sides.
    """

    shape: tuple[int, ...]

    def reads(self) -> Iterator[Tensor]:
        """The values that it is computed from."""
        yield from ()


@dataclass(frozen=True, eq=False)
class Input(Tensor):
    """A tensor in memory.

    Attributes:
        parameter: the kernel's name of it, `x0` for the first argument or `c0` for the first constant.
        dtype: fp16, bf16 or fp32.
        strides: in elements.
    """

    parameter: str
    dtype: str
    strides: tuple[int, ...]

    def address(self, at: Coordinates) -> Index:
        """Where an element lies, in elements."""
        found = number(0)
        for coordinate, stride in zip(at, self.strides, strict=True):
            found = found + coordinate * stride
        return found


@dataclass(frozen=True, eq=False)
class Elementwise(Tensor):
    """A function of values of the same shape, element by element.

    Attributes:
        function: a function of `fusion_operators.cuh`, without its prefix.
        args: the values.
        numbers: further arguments.
    """

    function: str
    args: tuple[Tensor, ...]
    numbers: tuple[float, ...] = ()

    def reads(self) -> Iterator[Tensor]:
        """Its arguments."""
        yield from self.args


@dataclass(frozen=True, eq=False)
class Moved(Tensor):
    """The elements of one value at other positions."""

    of: Tensor

    def reads(self) -> Iterator[Tensor]:
        """The value."""
        yield self.of

    def source(self, at: Coordinates) -> Coordinates:
        """Where an element comes from."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class Permuted(Moved):
    """Dimensions in another order: dimension i is the value's dimension `order[i]`."""

    order: tuple[int, ...]

    def source(self, at: Coordinates) -> Coordinates:
        """The coordinates, put back."""
        return tuple(at[self.order.index(place)] for place in range(len(at)))


@dataclass(frozen=True, eq=False)
class Reshaped(Moved):
    """The same elements in row-major order under other sides."""

    def source(self, at: Coordinates) -> Coordinates:
        """The coordinates of the same position."""
        return taken_apart(joined(at, self.shape), self.of.shape)


@dataclass(frozen=True, eq=False)
class Broadcast(Moved):
    """A value repeated along sides of 1 and along new sides in front."""

    def source(self, at: Coordinates) -> Coordinates:
        """Without the new sides, 0 on sides of 1."""
        last = at[len(at) - len(self.of.shape) :]
        return tuple(number(0) if side == 1 else place for side, place in zip(self.of.shape, last, strict=True))


@dataclass(frozen=True, eq=False)
class Sliced(Moved):
    """Every `step`-th position of one dimension, from `start`."""

    dim: int
    start: int
    step: int = 1

    def source(self, at: Coordinates) -> Coordinates:
        """The coordinate, moved and stretched."""
        return (*at[: self.dim], at[self.dim] * self.step + self.start, *at[self.dim + 1 :])


@dataclass(frozen=True, eq=False)
class Repeated(Moved):
    """Each element several times along each dimension: upsampling to the nearest."""

    factors: tuple[int, ...]

    def source(self, at: Coordinates) -> Coordinates:
        """The coordinates divided by the factors."""
        return tuple(place.divided(factor) for place, factor in zip(at, self.factors, strict=True))


@dataclass(frozen=True, eq=False)
class Concatenated(Tensor):
    """Values one behind the other along a dimension."""

    parts: tuple[Tensor, ...]
    dim: int

    def reads(self) -> Iterator[Tensor]:
        """The parts."""
        yield from self.parts

    def bounds(self) -> list[tuple[int, int]]:
        """Where each part begins and ends."""
        ends = [0]
        for part in self.parts:
            ends.append(ends[-1] + part.shape[self.dim])
        return list(pairwise(ends))


@dataclass(frozen=True, slots=True)
class Window:
    """The window of a pooling.

    Attributes:
        kind: `max` or `avg`.
        sides: size, stride and padding of each side behind the channels.
        counted: whether an average counts padding.
    """

    kind: Literal["max", "avg"]
    sides: tuple[tuple[int, ...], ...]
    counted: bool


@dataclass(frozen=True, eq=False)
class Windowed(Tensor):
    """A pooling."""

    of: Tensor
    window: Window

    def reads(self) -> Iterator[Tensor]:
        """The value."""
        yield self.of


@dataclass(frozen=True, eq=False)
class Interpolated(Tensor):
    """Bilinear upsampling of the last two of four dimensions.

    Attributes:
        of: the value.
        scales: what a step of the result is in steps of the value, down and across.
        align_corners: whether the corners' centres coincide, rather than the corners.
    """

    of: Tensor
    scales: tuple[float, float]
    align_corners: bool

    def reads(self) -> Iterator[Tensor]:
        """The value."""
        yield self.of


ReductionKind = Literal["sum", "max"]


@dataclass(frozen=True, eq=False)
class Reduced(Tensor):
    """A sum or maximum over some dimensions, which stay with side 1."""

    of: Tensor
    dims: tuple[int, ...]
    kind: ReductionKind

    def reads(self) -> Iterator[Tensor]:
        """The value."""
        yield self.of

    @property
    def length(self) -> int:
        """Elements that go into one result."""
        return math.prod(self.of.shape[dim] for dim in self.dims)


def reachable(results: Sequence[Tensor]) -> list[Tensor]:
    """All values that results are computed from, each once, those that are read before their readers."""
    found: dict[int, Tensor] = {}
    waiting: list[tuple[Tensor, bool]] = [(tensor, False) for tensor in reversed(results)]
    while waiting:
        tensor, done = waiting.pop()
        if id(tensor) in found:
            continue
        if done:
            found[id(tensor)] = tensor
            continue
        waiting.append((tensor, True))
        waiting.extend((each, False) for each in tensor.reads())
    return list(found.values())


def broadcast(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A value under the rules of broadcasting.

    Raises:
        NotFusibleError: the shapes do not fit.
    """
    if tensor.shape == shape:
        return tensor
    sides = (1,) * (len(shape) - len(tensor.shape)) + tensor.shape
    if len(sides) != len(shape) or any(side not in (1, wanted) for side, wanted in zip(sides, shape, strict=True)):
        raise NotFusibleError(f"cannot broadcast {list(tensor.shape)} to {list(shape)}")
    return Broadcast(shape, tensor)
