"""The tile configurations of `pruned.direct`, and the layout of input, sums and entries in shared memory. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from typing import Final

from convoy.engines.base import Knobs
from convoy.engines.hopper.nvrtc_source import ACTIVATIONS
from convoy.engines.sparse_weights.codegen.plane_layout import PlaneLayout, lay_out
from convoy.problem import ConvProblem

LANES: Final = 32
FOUR: Final = 4
"""Entries are read in fours, floats copied in fours where they lie so."""

ENTRY_BYTES: Final = 8
BARRIER_BYTES: Final = 16
ONE_BY_ONE, FOURS, FLAT = range(3)
"""How input is copied: a float at a time, four at a time, or all channels as one run."""

MOST_ROUNDS: Final = 4
"""Floats of a plane that a thread copies, where more threads can go along it: each has a register."""

ON_THEIR_WAY: Final = 16384
"""Floats of a block that are requested before the first has arrived, some 700 clocks later."""

MOST_ON_THEIR_WAY: Final = 48
"""Of a thread: each has a register."""

REGISTERS: Final = 1 << 16
"""Of a multiprocessor."""

LEAST_REGISTERS: Final = 26
POSITION_REGISTERS: Final = 4
"""Of a thread, and of each of its positions: 1024 threads spill ten of them."""

MOST_PHASES: Final = 7
MOST_STRIDE: Final = 255
"""Rows that taps begin at are bytes of a macro, and columns."""


@dataclass(frozen=True, slots=True)
class DirectTile:
    """One tile configuration of the kernel.

    Attributes:
        vectors: positions of a lane: a warp computes `32 * vectors` of a filter.
        filters: filters of a block.
        slices: blocks of a cluster, each with a part of the channels.
        parts: warps of a block that share a filter's entries.
        each: filters of a warp, one after another.
    """

    vectors: int
    filters: int
    slices: int
    parts: int
    each: int

    @property
    def tile(self) -> int:
        """Positions of a block."""
        return LANES * self.vectors

    @property
    def width(self) -> int:
        """Sums that a lane sends, in words of one, two or four."""
        return self.vectors if self.vectors <= 2 else -(-self.vectors // FOUR) * FOUR

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return LANES * self.filters * self.parts // self.each

    @property
    def outputs(self) -> int:
        """Results of a thread, where they come from other warps or blocks."""
        return -(-(self.filters // self.slices * LANES * self.width) // self.threads)

    @property
    def knobs(self) -> Knobs:
        """The configuration as an engine's knobs."""
        return Knobs.of(
            vectors=self.vectors, filters=self.filters, slices=self.slices, parts=self.parts, each=self.each
        )


def tile_config_of(knobs: Knobs) -> DirectTile:
    """The inverse of `DirectTile.knobs`."""
    return DirectTile(*(knobs.integer(name) for name in ("vectors", "filters", "slices", "parts", "each")))


def starts_of_phases(problem: ConvProblem) -> tuple[list[int], list[int]]:
    """Rows and columns of the padded image that the phases of the stride begin with."""
    rows = {r * problem.dilation_h % problem.stride_h for r in range(problem.r)}
    columns = {s * problem.dilation_w % problem.stride_w for s in range(problem.s)}
    return sorted(rows), sorted(columns)


@lru_cache(maxsize=256)
def _layout(problem: ConvProblem, tile: int) -> PlaneLayout:
    taps = product(range(problem.r), range(problem.s))
    return lay_out(problem, taps, (), tile=tile, images=problem.n, rows=problem.p)


class DirectGeometry:
    """A problem with a tile configuration.

    Args:
        problem: a convolution that the engine supports, with or without its mask, which is not used here.
        config: the tile configuration.
    """

    def __init__(self, problem: ConvProblem, config: DirectTile) -> None:
        self.problem, self.config = problem, config
        self.group_channels, self.group_filters = problem.c // problem.groups, problem.k // problem.groups
        self.channels = -(-self.group_channels // config.slices)
        self.blocks = -(-self.group_filters // config.filters)
        self.rows, self.columns = starts_of_phases(problem)
        self.phases = len(self.rows) * len(self.columns)

    @cached_property
    def layout(self) -> PlaneLayout:
        """Of the whole batch, with every tap."""
        return _layout(self.problem, self.config.tile)

    @property
    def tiles(self) -> int:
        """Tiles of positions."""
        return self.layout.positions // self.config.tile

    @cached_property
    def copy(self) -> int:
        """How input is copied."""
        problem = self.problem
        plain = (problem.r, problem.s, problem.stride_h, problem.stride_w, problem.pad_h, problem.pad_w) == (
            1,
            1,
            1,
            1,
            0,
            0,
        )
        if not plain or problem.x_dtype != "fp32":
            return ONE_BY_ONE
        pixels = problem.h * problem.w
        whole = not (self.channels * pixels % FOUR or self.group_channels * pixels % FOUR)
        if problem.n == 1 and self.tiles == 1 and whole:
            return FLAT
        return ONE_BY_ONE if pixels % FOUR else FOURS

    @property
    def span(self) -> int:
        """Floats of a plane in shared memory."""
        return self.problem.h * self.problem.w if self.copy == FLAT else self.layout.span

    @property
    def floats(self) -> int:
        """Floats of a block's input; if it lies as in memory, also the floats that a last tile's idle lanes read."""
        floats = self.channels * self.phases * self.span + (self.config.tile if self.copy == FLAT else 0)
        return -(-floats // FOUR) * FOUR

    @property
    def along(self) -> int:
        """Threads that go along a plane as it is copied: a part of the block's."""
        warps = self.config.threads // LANES
        ways = [LANES * count for count in range(1, warps + 1) if not warps % count]
        return next((way for way in ways if -(-self.span // way) <= MOST_ROUNDS), ways[-1])

    @property
    def on_their_way(self) -> int:
        """Floats that a thread asks for before it stores them, where they are copied one by one."""
        return max(1, min(MOST_ON_THEIR_WAY, ON_THEIR_WAY // self.config.threads))

    @property
    def zeros_bytes(self) -> int:
        """Where zeros begin."""
        return self.floats * 4

    @property
    def received_bytes(self) -> int:
        """Offset of the sums that come from other warps and blocks, after their barrier."""
        return self.zeros_bytes + self.config.tile * 4 + BARRIER_BYTES

    @property
    def list_bytes(self) -> int:
        """Where a block's entries begin."""
        return self.received_bytes + (self.sums_bytes if self.config.slices * self.config.parts > 1 else 0)

    @property
    def sums_bytes(self) -> int:
        """Sums of a block's warps, where they are added to those of others."""
        config = self.config
        return config.filters * config.parts * LANES * config.width * 4

    @property
    def head(self) -> int:
        """Words before the entries: where each filter's begin, and the end, up to whole fours."""
        return -(-(self.config.filters + 1) // FOUR) * FOUR

    @property
    def grid(self) -> int:
        """Blocks of a launch."""
        return self.config.slices * self.tiles * self.blocks * self.problem.groups

    def shared_bytes_for(self, entries: int) -> int:
        """Shared memory of a block with so many entries, padding included; four more are loaded and not used."""
        return self.list_bytes + 4 * self.head + ENTRY_BYTES * (entries + FOUR)

    def asked(self, entries: int, most: int) -> int:
        """Shared memory that a block asks for: more than half of a multiprocessor's, so that there is one block on each.

        Blocks of a launch that starts before the last one has ended would else be put two and three on those multiprocessors that
        are free, while others have none.

        Args:
            entries: of the longest list.
            most: bytes that a block may have.
        """
        return max(self.shared_bytes_for(entries), most // 2 + 1)

    def parameters(self) -> dict[str, int]:
        """The values of `direct_config.cuh`."""
        problem, config, layout = self.problem, self.config, self.layout
        epilogue = problem.epilogue
        return {
            "HALF": int(problem.x_dtype == "fp16"), "VECTORS": config.vectors, "FILTERS": config.filters,
            "SLICES": config.slices,
            "PARTS": config.parts, "FILTERS_OF_WARP": config.each, "CHANNELS": self.channels, "FILTER_BLOCKS": self.blocks,
            "GROUP_CHANNELS": self.group_channels, "GROUP_FILTERS": self.group_filters, "TILES": self.tiles,
            "BATCH": problem.n, "X_CHANNELS": problem.c, "X_ROWS": problem.h, "X_COLUMNS": problem.w,
            "Y_CHANNELS": problem.k, "Y_ROWS": problem.p,
            "Y_COLUMNS": problem.q,
            "STRIDE_H": problem.stride_h, "STRIDE_W": problem.stride_w, "PAD_H": problem.pad_h, "PAD_W": problem.pad_w,
            "PITCH": layout.pitch, "IMAGE_ROWS": layout.image_rows, "SPAN": self.span,
            "PHASES_H": len(self.rows), "PHASES_W": len(self.columns),
            "ROWS_OF_PHASES": int.from_bytes(bytes(self.rows), "little"),
            "COLUMNS_OF_PHASES": int.from_bytes(bytes(self.columns), "little"),
            "COPY_MODE": self.copy, "ALONG": self.along,
            "ON_THEIR_WAY": self.on_their_way,
            "WIDTH": config.width, "SEND_FLOATS": min(config.width, FOUR),
            "ZEROS_OFFSET": self.zeros_bytes,
            "BARRIER_OFFSET": self.received_bytes - BARRIER_BYTES, "RECEIVED_OFFSET": self.received_bytes,
            "LIST_OFFSET": self.list_bytes, "LIST_HEAD": self.head,
            "HAS_BIAS": int(epilogue.bias), "HAS_RESIDUAL": int(epilogue.residual),
            "ACTIVATION": ACTIVATIONS.index(epilogue.activation),
        }  # fmt: skip
