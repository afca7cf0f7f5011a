"""Tile configurations of `gated_1x1.cu`, their shared memory, and a cost model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Final, Self

from convoy.engines.gates.gated_1x1_pattern import Gated1x1
from convoy.engines.gates.squeeze_excitation import GateTile
from convoy.errors import InputError
from convoy.problem import Knobs

_STEP: Final = 16
"""Channels of one product of a warp."""

_MOST_SUMS: Final = 32
"""Tiles of 16 x 8 sums that a warp holds: half of a thread's registers."""

_START_US, _CHUNK_US, _PRODUCT_US, _LOAD_US, _STORE_US, _GATE_US = 2.36, 0.27, 0.0045, 0.029, 0.104, 0.05
_BYTES_US, _OVERLAP = 3.2e6, 0.54
"""Microseconds of a launch, of a chunk's barriers, and of one product, load, store and step of a gate in each thread; bytes a
microsecond; and what share of their work the warps of a multiprocessor do one after another. Fitted to 804 settings of
blocks of EfficientNet-B0 and MobileNetV3 at batch 1, 8 and 32 on an H100 (20 %)."""

_WARPS: Final = tuple((m, k) for m in range(1, 9) for k in (1, 2, 4, 8) if m * k <= 8)
"""Warps along the pixels and along the channels."""

_SM_BYTES: Final = {False: 100 << 10, True: 228 << 10}
"""Shared memory of a multiprocessor: before capability 9.0 (the least of 8.0 to 8.9), and of 9.0."""


@dataclass(frozen=True, slots=True)
class GatedTile:
    """A tile configuration.

    Attributes:
        squeeze: of the first launch.
        block_m: pixels that a block computes at a time, all of one image.
        passes: how many times it does.
        block_n: filters of a block.
        warps_m: warps along the pixels.
        warps_k: warps along the channels.
        chunk: channels of a stage.
        stages: of the ring of pixels.
    """

    squeeze: GateTile
    block_m: int
    passes: int
    block_n: int
    warps_m: int
    warps_k: int
    chunk: int
    stages: int

    @property
    def threads(self) -> int:
        """Of a block of the second launch."""
        return 32 * self.warps_m * self.warps_k

    @property
    def knobs(self) -> Knobs:
        """As an engine's knobs."""
        return Knobs.of(
            block_c=self.squeeze.block_c, rows=self.squeeze.rows, threads=self.squeeze.threads,
            block_m=self.block_m, passes=self.passes, block_n=self.block_n, warps_m=self.warps_m,
            warps_k=self.warps_k, chunk=self.chunk, stages=self.stages,
        )  # fmt: skip

    @classmethod
    def of(cls, knobs: Knobs) -> Self:
        """Inverse of `knobs`; raises InputError for knobs without a valid kernel."""
        names = ("block_m", "passes", "block_n", "warps_m", "warps_k", "chunk", "stages")
        tile = cls(GateTile.of(knobs), *(knobs.integer(name) for name in names))
        right = (
            min(tile.block_m, tile.passes, tile.block_n, tile.warps_m, tile.warps_k, tile.chunk) > 0
            and 2 <= tile.stages <= 8
        )
        right = right and tile.block_m % (_STEP * tile.warps_m) == 0 and tile.block_n % 8 == 0
        right = right and tile.chunk % (_STEP * tile.warps_k) == 0 and tile.threads <= 1024
        if not right:
            raise InputError(
                "knobs", str(knobs),
                "block_m in multiples of 16 warps_m, block_n of 8, chunk of 16 warps_k, 2 to 8 stages, up to 32 warps",
            )  # fmt: skip
        return tile

    def tiles_m(self, problem: Gated1x1) -> int:
        """Blocks along an image's pixels."""
        return -(-problem.block.pixels // (self.block_m * self.passes))

    def tiles_n(self, problem: Gated1x1) -> int:
        """Blocks along the filters."""
        return -(-problem.filters // self.block_n)

    def grid(self, problem: Gated1x1) -> int:
        """Blocks of the second launch."""
        return problem.block.images * self.tiles_m(problem) * self.tiles_n(problem)

    def shared_bytes(self, problem: Gated1x1) -> int:
        """Shared memory of a block of the second launch, as the kernel lays it out."""
        block, chunks = problem.block, -(-problem.block.channels // self.chunk)
        depth = chunks * self.chunk
        adders = max(1, min(self.threads // block.hidden, self.squeeze.parts(block)))
        before = self.block_n * (2 * depth + 16) + 2 * depth + 8 * (adders + 1) * block.hidden
        before = -(-before // 16) * 16 + 2 * block.hidden * block.channels
        ring = min(self.stages, chunks * self.passes) * self.block_m * (2 * self.chunk + 16)
        sums = 4 * self.warps_k * self.block_m * (self.block_n + (0 if self.block_n % 16 else 8))
        return before + (max(ring, sums) if self.passes == 1 else ring + sums)

    def parameters(self, problem: Gated1x1, *, dependent: bool) -> dict[str, int]:
        """The values of `squeeze_excitation_config.cuh` and `gated_1x1_config.cuh`."""
        return {
            **self.squeeze.parameters(problem.block, dependent=dependent), "FILTERS": problem.filters,
            "BLOCK_M": self.block_m, "PASSES": self.passes, "BLOCK_N": self.block_n, "WARPS_M": self.warps_m,
            "WARPS_K": self.warps_k, "CHUNK": self.chunk, "STAGES": self.stages,
            "HAS_PRODUCT_BIAS": int(problem.bias), "ADDS_RESIDUAL": int(problem.residual),
            "RELU_AT_END": int(problem.relu),
        }  # fmt: skip

    def guess_us(self, problem: Gated1x1, units: int, *, hopper: bool = True) -> float:
        """Estimated microseconds of the second launch: a start, and the longest of blocks' rounds, all warps' work, and bytes."""
        block, chunks, warps = problem.block, -(-problem.block.channels // self.chunk), self.threads // 32
        grid = self.grid(problem)
        beside = max(1, min(_SM_BYTES[hopper] // (self.shared_bytes(problem) + 1024), 2048 // self.threads, 24))
        products = self.block_m // _STEP * (self.block_n // 8) * (self.chunk // _STEP) / warps
        loads = self.block_m * self.chunk / 8 / self.threads
        stores = self.block_m * self.block_n / 8 / self.threads
        gates = _GATE_US * block.hidden * block.channels / (4 * self.threads)
        work = self.passes * (chunks * (_PRODUCT_US * products + _LOAD_US * loads) + _STORE_US * stores) + gates
        alone = work + self.passes * chunks * _CHUNK_US
        moved = 2 * (
            grid * self.passes * self.block_m * chunks * self.chunk + block.images * block.pixels * problem.filters
        )
        rounds = -(-grid // (beside * units))
        return _START_US + max(rounds * alone, grid / units * warps * work * _OVERLAP, moved / _BYTES_US)


def tiles(problem: Gated1x1, squeeze: GateTile, units: int, shared_limit: int) -> Iterator[GatedTile]:
    """Configurations worth trying behind a first launch; with more than one turn only where blocks fill the GPU nevertheless."""
    depth = -(-problem.block.channels // _STEP)
    for block_m, block_n, warps in product((16, 32, 48, 64, 112, 128), _columns(problem.filters), _WARPS):
        warps_m, warps_k = warps
        rows = block_m // (_STEP * warps_m) if block_m % (_STEP * warps_m) == 0 else 0
        if not 0 < rows * (block_n // 8) <= _MOST_SUMS or warps_k > depth or warps_m * warps_k < min(2, depth):
            continue
        if block_m >= 2 * problem.block.pixels and block_m > _STEP:
            continue
        for passes in (1, 2, 4, 8, 16):
            tile = GatedTile(squeeze, block_m, passes, block_n, warps_m, warps_k, _chunk(depth, warps_k), 4)
            too_few = passes > 1 and (tile.grid(problem) < units or (passes - 1) * block_m >= problem.block.pixels)
            if not too_few and tile.shared_bytes(problem) <= shared_limit:
                yield tile


def _columns(filters: int) -> list[int]:
    """Filters of a block: the filters in up to twenty equal parts, rounded up to whole tiles."""
    found = {8 * math.ceil(filters / parts / 8) for parts in (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20)}
    return sorted(columns for columns in found if columns <= 128)


def _chunk(depth: int, warps_k: int) -> int:
    """Channels of a stage for so many steps: up to eight steps, or one for each warp, with the fewest steps of zeros."""
    sizes = range(warps_k, max(8, warps_k) + 1, warps_k)
    return _STEP * min(sizes, key=lambda size: (-(-depth // size) * size, -size))
