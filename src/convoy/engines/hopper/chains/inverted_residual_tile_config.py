"""Tile configurations of `inverted_residual.cu` and `expand_depthwise.cu`: 1x1, depthwise and 1x1 convolutions in one kernel."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Final, NamedTuple

from convoy.engines.hopper.chains.inverted_residual_block import InvertedResidual
from convoy.engines.hopper.nvrtc_source import ACTIVATIONS
from convoy.errors import InputError
from convoy.problem import Knobs

CHANNELS: Final = 8
"""Channels come in vectors of 16 bytes."""

STEP: Final = 16
"""Channels that a product adds up."""

MOST_SUMS: Final = 128
"""Sums of y that a thread holds: beside them it needs about 100 registers."""

MOST_WARPS: Final = 16
_EXPANDING: Final = 64
_FILTERING: Final = 56
_A_ROW: Final = 12
"""Registers that a thread needs besides its sums, by NVRTC 13.0: to expand; to filter, and for each row of a unit more."""

_ALONE_EXPANDING: Final = 50
_ALONE_FILTERING: Final = 40
"""The same without a last layer, by 48 settings that NVRTC 13.0 compiled for more and more blocks until it spilled."""

_MOST_REGISTERS: Final = 248
"""By that count: with 252, some settings spilled eight bytes."""
_SM_REGISTERS: Final = 65536
_SM_THREADS: Final = 2048
_SM_BYTES: Final = {False: 100 << 10, True: 228 << 10}
"""Of a multiprocessor; shared memory before capability 9.0 (the least of 8.0 to 8.9), and from it."""

_PAD: Final = 16
"""Bytes behind each row in shared memory, so that rows begin in different banks."""


class TileNeeds(NamedTuple):
    """Memory, registers and threads of a block. Windows, stages and clusters multiply or divide them.

    Attributes:
        positions: pixels of x in a tile, with the halo.
        pixel_bytes: of shared memory, for x and for a bit of each position.
        stage_bytes: for a slice of the weights.
        window_bytes: for a slice of expanded values.
        sum_bytes: for the sums of y, where weights and windows were before.
        registers: of a thread, about.
        threads: of the block.
    """

    positions: int
    pixel_bytes: int
    stage_bytes: int
    window_bytes: int
    sum_bytes: int
    registers: int
    threads: int

    def shared_bytes(self, windows: int, stages: int) -> int:
        """Shared memory in bytes."""
        return self.pixel_bytes + max(stages * self.stage_bytes + windows * self.window_bytes, self.sum_bytes)

    def blocks_per_sm(self, shared_bytes: int, *, hopper: bool) -> int:
        """Blocks of threads with so much shared memory that a multiprocessor has at one time."""
        fit = min(_SM_BYTES[hopper] // (shared_bytes + 1024), _SM_REGISTERS // (self.threads * self.registers))
        return max(1, min(fit, _SM_THREADS // self.threads, 32))


@dataclass(frozen=True, slots=True)
class InvertedTile:
    """One way to cut a block's work; a unit is `rows` rows of eight neighbouring columns of y.

    Attributes:
        octets: units side by side.
        rows: of a unit.
        bands: units one below the other.
        warps_k: warps that share units, each with a part of the channels inside.
        slice_k: channels inside that are expanded at a time.
        windows: slices of expanded values in shared memory; with 2, one is made while the other is filtered.
        stages: of the ring of weights.
        expand_m: tiles of 16 pixels that a warp expands at a time.
        block_n: filters of a block of threads; 0 without a last layer.
        expand_n: warps that share such tiles, each with a part of the slice.
        cluster: blocks of threads that share a tile, each with some of the slices, and add up their sums.
        share: likewise, without a last layer: they have no sums.
    """

    octets: int
    rows: int
    bands: int
    warps_k: int
    slice_k: int
    windows: int
    stages: int
    expand_m: int
    block_n: int
    expand_n: int = 1
    cluster: int = 1
    share: int = 1

    @property
    def knobs(self) -> Knobs:
        """The configuration as an engine's knobs."""
        values = asdict(self)
        return Knobs.of(**{name: values[name] for name in _names(share=not self.block_n)})

    @classmethod
    def of(cls, knobs: Knobs) -> InvertedTile:
        """Inverse of `knobs`; raises InputError for knobs that name no valid configuration."""
        names = _names(share="share" in knobs)
        tile = cls(**{"block_n": 0, **{name: knobs.integer(name) for name in names}})
        positive = min(knobs.integer(name) for name in names) >= 1
        right = positive and tile.octets * tile.bands % 2 == 0 and tile.warps <= MOST_WARPS and tile.stages <= 6
        right = right and tile.slice_k % (STEP * tile.warps_k) == tile.slice_k % (STEP * tile.expand_n) == 0
        right = right and tile.block_n % CHANNELS == 0 and tile.windows < min(tile.stages, 3)
        if not (right and max(tile.expand_m, tile.expand_n) <= 2 and tile.cluster in (1, 2, 4, 8)):
            raise InputError(
                "knobs", str(knobs),
                "octets and bands with an even product, up to 16 warps, slice_k in multiples of 16 warps_k and of 16 expand_n, "
                "1 or 2 windows, more stages than windows, up to 6, expand_m and expand_n 1 or 2; block_n in multiples of 8 "
                "and clusters of 1, 2, 4 or 8, or a share",
            )  # fmt: skip
        return tile

    @property
    def warps(self) -> int:
        """Of a block of threads."""
        return self.octets * self.bands // 2 * self.warps_k

    @property
    def tile_rows(self) -> int:
        """Rows of y in a tile."""
        return self.rows * self.bands

    @property
    def tile_columns(self) -> int:
        """Columns of y in a tile."""
        return 8 * self.octets

    def slices(self, block: InvertedResidual) -> int:
        """Slices of the channels inside; the last one may have channels of zeros."""
        return -(-block.mid // self.slice_k)

    def own_slices(self, block: InvertedResidual) -> int:
        """Slices that a block of threads has; the last ones of a tile may have fewer."""
        return -(-self.slices(block) // (self.cluster * self.share))

    def parts(self, block: InvertedResidual) -> int:
        """Blocks of threads that share a tile's filters."""
        return -(-block.k // self.block_n) if self.block_n else 1

    def grid(self, block: InvertedResidual) -> int:
        """Blocks of threads."""
        tiles = -(-block.p // self.tile_rows) * -(-block.q // self.tile_columns)
        return block.n * tiles * self.parts(block) * self.cluster * self.share

    def positions(self, block: InvertedResidual) -> int:
        """Pixels of x in a tile, with the halo."""
        stride, taps = block.stride, block.taps
        return ((self.tile_rows - 1) * stride + taps) * ((self.tile_columns - 1) * stride + taps)

    def expand_turns(self, block: InvertedResidual) -> int:
        """How often a warp expands `expand_m` tiles of 16 pixels, for each slice."""
        return -(-(-(-self.positions(block) // (STEP * self.expand_m)) * self.expand_n) // self.warps)

    def stage_bytes(self, block: InvertedResidual) -> int:
        """A slice of the weights, as the kernel lays it out."""
        taps = self.slice_k // 2 * tap_words(block) * 4
        return self.slice_k * row_bytes(block.c) + self.block_n * row_bytes(self.slice_k) + taps + 8 * self.slice_k

    def needs(self, block: InvertedResidual) -> TileNeeds:
        """What depends on neither windows nor stages nor clusters; bytes as in inverted_residual_layout.cuh."""
        positions, pixels = self.positions(block), self.warps_k * self.tile_rows * self.tile_columns
        columns = self.block_n if self.block_n % STEP or not self.block_n else self.block_n + 8
        return TileNeeds(
            positions, positions * row_bytes(block.c) + -(-positions // 128) * 16, self.stage_bytes(block),
            positions * row_bytes(self.slice_k), 4 * pixels * columns,
            self.registers(block), 32 * self.warps,
        )  # fmt: skip

    def shared_bytes(self, block: InvertedResidual) -> int:
        """Shared memory of a block of threads."""
        return self.needs(block).shared_bytes(self.windows, self.stages)

    @property
    def sums(self) -> int:
        """Sums of y that a thread holds."""
        return self.rows * self.block_n // 2

    def registers(self, block: InvertedResidual) -> int:
        """Registers that a thread needs, about."""
        if not block.projects:
            wide = block.taps - 3
            row = 12 + 3 * wide + (block.stride - 1) * (4 + 2 * wide)
            expanding = _ALONE_EXPANDING + self.expand_m * self.slice_k // (2 * self.expand_n)
            return max(expanding, _ALONE_FILTERING + 3 * wide + row * self.rows)
        filtering = _FILTERING + _A_ROW * self.rows + 6 * (block.taps * block.taps - 9)
        return self.sums + max(_EXPANDING + self.expand_m * self.slice_k // (2 * self.expand_n), filtering)

    def blocks_per_sm(self, block: InvertedResidual, *, hopper: bool) -> int:
        """Blocks of threads that a multiprocessor has at one time; the compiler keeps registers for as many."""
        return self.needs(block).blocks_per_sm(self.shared_bytes(block), hopper=hopper)

    def refusal(self, block: InvertedResidual, shared_limit: int) -> str:
        """Why the kernel cannot compute a block so; empty if it can."""
        most = min(_MOST_REGISTERS, _SM_REGISTERS // (32 * self.warps))
        if self.sums > MOST_SUMS or self.registers(block) > most:
            return f"needs {self.registers(block)} registers, of {most}"
        if block.projects != (self.block_n > 0):
            return "has filters of a layer that is not there" if self.block_n else "has no filters"
        if (self.cluster * self.share - 1) * self.own_slices(block) >= self.slices(block):
            return "has blocks without a slice"
        if self.shared_bytes(block) > shared_limit:
            return f"needs {self.shared_bytes(block)} bytes of shared memory, of {shared_limit}"
        return ""

    def parameters(self, block: InvertedResidual, *, hopper: bool) -> dict[str, int]:
        """The values of `inverted_residual_config.cuh`; capability 9.0 and newer launches dependent kernels early."""
        first, second = (ACTIVATIONS.index(word) for word in block.activations)
        return {
            "CHANNELS": block.c, "FILTERS": block.k, "HEIGHT": block.h, "WIDTH": block.w, "TAPS": block.taps,
            "STRIDE": block.stride, "FIRST_ACTIVATION": first, "SECOND_ACTIVATION": second,
            "HAS_RESIDUAL": int(block.residual), "BFLOAT": int(block.dtype == "bf16"), "DEPENDENT": int(hopper),
            "OCTETS": self.octets, "ROWS": self.rows, "BANDS": self.bands, "WARPS_K": self.warps_k,
            "SLICE": self.slice_k, "SLICES": self.slices(block), "WINDOWS": self.windows, "STAGES": self.stages,
            "EXPAND_M": self.expand_m, "EXPAND_N": self.expand_n, "BLOCK_N": self.block_n,
            "CLUSTER": self.cluster, "SHARE": self.share, "MIN_BLOCKS": self.blocks_per_sm(block, hopper=hopper),
        }  # fmt: skip


def row_bytes(channels: int) -> int:
    """From row to row of a matrix in shared memory: channels in whole products, and the pad."""
    return -(-channels // STEP) * STEP * 2 + _PAD


def tap_words(block: InvertedResidual) -> int:
    """Words of a pair of channels' depthwise filters, in whole vectors."""
    return -(-block.taps * block.taps // 4) * 4


def _names(*, share: bool) -> tuple[str, ...]:
    """The knobs of a kernel with a last layer, or of the one without."""
    names = ("octets", "rows", "bands", "warps_k", "slice_k", "windows", "stages", "expand_m", "expand_n")
    return (*names, "share") if share else (*names, "block_n", "cluster")
