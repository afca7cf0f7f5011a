"""The tile configurations of `pruned.cuda`'s code: threads, pixels, filters, and the layout of a block's input. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from convoy.engines.base import Knobs
from convoy.engines.sparse_weights.codegen.lower_mask import positions, used_channels, used_taps
from convoy.engines.sparse_weights.codegen.plane_layout import PlaneLayout, lay_out
from convoy.problem import ConvProblem, WeightMask
from convoy.target import Target

CODE_BYTES: Final = 24 << 10
"""A barrier after so much code, about, keeps a block's warps together in the instruction cache (NVIDIA, "reducing instruction
cache misses")."""

SHARED_BYTES: Final = {80: 163 << 10, 87: 163 << 10, 90: 227 << 10, 100: 227 << 10, 103: 227 << 10}
"""Shared memory of a block by compute capability (CUDA C++ Programming Guide, table of technical specifications); 99 KB
elsewhere."""

RESERVED_BYTES: Final = 1 << 10
"""Bytes of shared memory that the system reserves for each block."""

SPARE_REGISTERS: Final = (48, 72, 96)
"""Registers besides the sums: at least, of up to 16 sums; at least, of more; at most. They hold addresses, and loads under way.
With 48 besides 32 sums ptxas spilled, with 48 besides 16 it did not."""

FEW_SUMS: Final = 16

FOUR: Final = 4
"""Floats of the widest copy."""

VECTORS: Final = (1, 2, 4)
"""Pixels of a thread, limited by the word sizes."""


@dataclass(frozen=True, slots=True)
class GeneratedTile:
    """One tile configuration of the code.

    Attributes:
        lanes: threads along a tile's pixels.
        vectors: neighbouring pixels of a thread.
        filters: filters of a group, at most: a thread has `filters * vectors` sums.
        splits: sets of `lanes` threads that compute different taps of the same pixels.
        channels: input channels of a step, at most.
        shared_kib: shared memory for steps, in KiB.
        resident: blocks that a multiprocessor should hold at once.
    """

    lanes: int
    vectors: int
    filters: int
    splits: int
    channels: int
    shared_kib: int
    resident: int

    @property
    def tile(self) -> int:
        """Pixels of a block."""
        return self.lanes * self.vectors

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.lanes * self.splits

    @property
    def shared_bytes(self) -> int:
        """Shared memory that steps may fill."""
        return self.shared_kib << 10

    @property
    def code_bytes(self) -> int:
        """Code of a step, in the walk's own measure: bytes of each split, if a thread had one pixel."""
        return CODE_BYTES * self.splits // self.vectors

    @property
    def registers(self) -> int:
        """Registers of a thread, at most."""
        wanted = max(128, self.filters * self.vectors + SPARE_REGISTERS[2])
        return min(wanted, 65536 // (self.threads * self.resident) // 8 * 8)

    @property
    def is_cramped(self) -> bool:
        """Whether a thread has fewer registers than its sums want."""
        sums = self.filters * self.vectors
        return self.registers < sums + SPARE_REGISTERS[sums > FEW_SUMS]

    @property
    def knobs(self) -> Knobs:
        """The knobs that do not follow from the problem and the device."""
        return Knobs.of(lanes=self.lanes, vectors=self.vectors, filters=self.filters, splits=self.splits)


def block_bytes(target: Target) -> int:
    """Shared memory that a block can have."""
    return SHARED_BYTES.get(target.capability, 99 << 10)


def template(problem: ConvProblem, config: GeneratedTile) -> PlaneLayout:
    """The input layout of a tile configuration: one block with the whole batch.

    Copies of four floats are possible if that takes no more tiles.
    """
    assert problem.mask is not None
    taps, channels = _reads(problem.mask, problem.groups)

    def laid(align: int, slack: int) -> PlaneLayout:
        whole = {"tile": config.tile, "images": problem.n, "rows": problem.p}
        return lay_out(problem, taps, channels, **whole, align=align, slack=slack)

    plain = laid(config.vectors, 0)
    if problem.x_dtype != "fp32" or problem.stride_w != 1 or problem.w % FOUR:
        return plain
    fours = laid(FOUR, FOUR - 1)
    return fours if fours.positions == plain.positions else plain


@lru_cache(maxsize=64)
def _reads(mask: WeightMask, groups: int) -> tuple[list[tuple[int, int]], tuple[int, ...]]:
    """Taps and input channels that some filter reads."""
    nonzero = positions(mask)
    return used_taps(nonzero), used_channels(nonzero, groups)
