"""The kernel IR: straight-line code of loads and multiply-adds for groups of filters. Plain data; no torch here.

Types: an *offset* (int) into the input's floats, a *sum* (one number a lane and vector, by its index in the group), a *value*
(one weight, by its index in the order of use). `tile = lanes * vectors` pixels are computed at once; a kernel does the same
for every tile, further on in the input. `verify` is the IR's executable specification.
"""

from __future__ import annotations

from dataclasses import dataclass

from convoy.errors import InputError


@dataclass(frozen=True, slots=True)
class Load:
    """Load one tile of inputs from an offset, and add its products with values to sums.

    Attributes:
        offset: floats from the tile's start in the input (in the staged input, if the segment is staged).
        uses: pairs (sum, value), at least one: the multiply-adds that share this load.
    """

    offset: int
    uses: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Segment:
    """Straight-line code of one function, small enough for the instruction cache.

    Attributes:
        begins: whether sums start at zero; otherwise they continue from the previous segment.
        loads: the code.
        stage: planes that are copied to shared memory first, `span` floats of each; empty if the input is read in place.
        split: index of the split. Each split has its own sums and its own threads; the sums are added at the end.
    """

    begins: bool
    loads: tuple[Load, ...]
    stage: tuple[int, ...] = ()
    split: int = 0

    @property
    def uses(self) -> int:
        """Multiply-adds of one tile."""
        return sum(len(load.uses) for load in self.loads)


@dataclass(frozen=True, slots=True)
class Group:
    """Filters whose sums are held in registers together, and the segments that compute them, in order."""

    filters: tuple[int, ...]
    segments: tuple[Segment, ...]

    @property
    def uses(self) -> int:
        """Multiply-adds of one tile."""
        return sum(segment.uses for segment in self.segments)


@dataclass(frozen=True, slots=True)
class MaskKernel:
    """The code of one layer.

    Attributes:
        lanes: pixels that one vector (C) or one block of threads (CUDA) holds.
        vectors: vectors of pixels held at once, by each lane.
        positions: pixels that a plane's tiles cover: the last tile ends here.
        plane: floats from one plane of the input to the next.
        planes: planes of the input.
        span: floats of a plane that one tile reads, and that a stage copies.
        values: weights that are not zero.
        groups: the code; every filter of the layer is in one.
    """

    lanes: int
    vectors: int
    positions: int
    plane: int
    planes: int
    span: int
    values: int
    groups: tuple[Group, ...]

    @property
    def tile(self) -> int:
        """Pixels computed at once."""
        return self.lanes * self.vectors

    @property
    def splits(self) -> int:
        """Splits of the code: 1 where all sums are of the same threads."""
        return 1 + max((segment.split for group in self.groups for segment in group.segments), default=0)


def verify(kernel: MaskKernel, filters: int) -> None:
    """Check every rule of the IR.

    Args:
        kernel: what to check.
        filters: filters of the layer.

    Raises:
        InputError: naming the place and the rule.
    """
    for name in ("lanes", "vectors", "positions", "plane"):
        _require(getattr(kernel, name) >= 1, name, getattr(kernel, name), "at least 1")
    for name in ("planes", "span", "values"):
        _require(getattr(kernel, name) >= 0, name, getattr(kernel, name), "at least 0")
    _require(
        kernel.positions % kernel.tile == 0, "positions", kernel.positions, f"a multiple of the tile, {kernel.tile}"
    )
    seen = sorted(index for group in kernel.groups for index in group.filters)
    _require(seen == list(range(filters)), "groups", seen[:8], f"each of {filters} filters in one group")
    value = 0
    for at, group in enumerate(kernel.groups):
        _require(bool(group.segments), f"group {at}", "no segment", "at least one: its sums must begin somewhere")
        begun: set[int] = set()
        for index, segment in enumerate(group.segments):
            where = f"group {at} segment {index}"
            _require(
                segment.begins == (segment.split not in begun), where, segment.begins,
                "the first segment of a split, and no other, to begin at zero",
            )  # fmt: skip
            begun.add(segment.split)
            value = _verify_segment(kernel, group, segment, where, value)
    _require(value == kernel.values, "values", kernel.values, f"as many as the code uses, {value}")


def _verify_segment(kernel: MaskKernel, group: Group, segment: Segment, where: str, value: int) -> int:
    """Check one segment; returns the value that the next one begins with."""
    reach = kernel.plane * kernel.planes - kernel.positions + kernel.tile
    if segment.stage:
        reach = kernel.span * len(segment.stage)
        _require(
            all(0 <= plane < kernel.planes for plane in segment.stage), where, segment.stage, "planes of the input"
        )
        _require(len(set(segment.stage)) == len(segment.stage), where, segment.stage, "each plane staged once")
    offsets = {load.offset for load in segment.loads}
    _require(len(offsets) == len(segment.loads), where, len(segment.loads), "one load of each offset: loads are shared")
    for load in segment.loads:
        expected = f"an offset whose tile ends by {reach}"
        _require(load.offset >= 0 and load.offset + kernel.tile <= reach, where, load.offset, expected)
        _require(bool(load.uses), where, load.offset, "a use of each load")
        for total, used in load.uses:
            _require(0 <= total < len(group.filters), where, total, f"a sum under {len(group.filters)}")
            _require(used == value, where, used, f"value {value}: values stand in the order of use")
            value += 1
    return value


def _require(condition: bool, where: str, found: object, expected: str) -> None:
    if not condition:
        raise InputError(where, found, expected)
