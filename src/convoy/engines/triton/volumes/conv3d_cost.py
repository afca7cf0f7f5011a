"""The cost model of `triton.conv3d`: an estimate of a tile's time.

The constants were fitted to 269 measured tiles of 17 layers, most of a 3-D U-Net: H100 80GB, fp16, batch 1, 2026-11-26
(docs/kernels/triton.md). Fitted without any one of the layers, the model still puts the fastest of that layer's measured tiles
among its first three. The comments name layers that show a constant.
"""

from __future__ import annotations

import math
from typing import Final

from convoy.engines.triton.volumes.conv3d_tile import VolumeTile, sizes_of, slices_read
from convoy.problem import Conv3dProblem
from convoy.problem.spec import DTYPE_BYTES

_CLOCK_GHZ: Final = 1.7

_TMA_ROW_NS: Final = 1.3
"""A row of a box of x by TMA, however short: an iteration of 16 channels takes as long as one of 32 (32 channels at 128^3)."""

_NEAR_BYTES_NS: Final = 100.0
"""Bytes a nanosecond into one multiprocessor by TMA: weights, and an x that half of the second-level cache holds."""

_FAR_BYTES_NS: Final = 64.0
"""The same of a larger x."""

_NEAR_BYTES: Final = 25 << 20
"""Half of an H100's second-level cache, the part beside a multiprocessor."""

_GATHERED_BYTES_NS: Final = 45.0
"""Bytes of x a nanosecond into one multiprocessor by gathered loads."""

_FLAT_BYTES_NS: Final = 6.0
"""The same where taps and channels are one axis, which loads single elements (1 to 32 channels at 128^3)."""

_MMA_FACTOR: Final = 2.0
"""Products with fewer than 64 rows: mma in place of wgmma."""

_PRODUCT_NS: Final = 80.0
"""What one product of boxes that share slices waits for: its block overlaps neither loads from shared memory nor products."""

_ROW_OF_A_WARP_NS: Final = 4.2
"""A row of x from shared memory into registers, for each row that a warp reads: 8 warps beat 4 (64 channels at 64^3)."""

_LATENCY_NS: Final = 300.0
"""Latency of a load, shared by the stages in flight: 256 to 128 channels at 32^3 took 91.5 us with 3 stages, 88.0 with 6."""

_BLOCK_NS: Final = 1500.0
"""Start and end of a thread block; resident blocks overlap theirs."""

_LAUNCH_US: Final = 3.0
_MEMORY_BYTES_NS: Final = 3000.0

_PARTIAL_BYTES_NS: Final = 6000.0
"""Writing and reading partial sums, after all else, mostly in the second-level cache: 15 us for 128 channels at 32^3 in two."""

_STRICT_FACTOR: Final = 12.0
"""Exact fp32 products; not fitted."""


def estimate_us(problem: Conv3dProblem, tile: VolumeTile, units: int, shared: int, *, strict: bool = False) -> float:
    """Estimated microseconds: infinite where a multiprocessor cannot hold a thread block.

    A multiprocessor takes its blocks in turn; an iteration takes as long as the slowest of tensor cores, loads, and what a
    block does in sequence, which resident blocks overlap.
    """
    splits, each = tile.splits(problem)
    a_unit = -(-math.prod(tile.tiles(problem)) * splits // units)
    sums = 1.5 * tile.depth * tile.pixels * tile.block_k / (32 * tile.warps)
    in_shared = shared // (tile.stages * tile.stage_bytes(problem) + 1024)
    resident = min(in_shared, int(65536 // ((sums + 40) * 32 * tile.warps)), 8)
    if sums + 40 > 250 or resident < 1:
        return math.inf
    active = max(1, min(a_unit, resident))
    step_ns = _step_ns(problem, tile, active) + _LATENCY_NS / (tile.stages * active)
    _, moved, _ = sizes_of(problem)
    time_ns = max(a_unit * (each * step_ns + _BLOCK_NS / active), moved / _MEMORY_BYTES_NS)
    time_ns += 2 * tile.split_bytes(problem) / _PARTIAL_BYTES_NS
    return (_LAUNCH_US + time_ns / 1000) * (_STRICT_FACTOR if strict else 1.0)


def _step_ns(problem: Conv3dProblem, tile: VolumeTile, active: int) -> float:
    """One iteration of one block, with `active` blocks on the multiprocessor."""
    width, taps = DTYPE_BYTES[problem.dtype], tile.taps_together(problem)
    products, row_bytes = tile.depth * taps, tile.block_c * width
    swapped = not tile.gather and tile.depth == 1
    first, second = (tile.block_k, tile.pixels) if swapped else (tile.pixels, tile.block_k)
    cycles = products * max(1.0, first / 64) * (row_bytes / 32) * max(second / 2, 16 + second / 4)
    products_ns = cycles / _CLOCK_GHZ * (_MMA_FACTOR if swapped and first < 64 else 1.0)
    weights_ns = taps * tile.block_k * row_bytes / _NEAR_BYTES_NS
    if tile.gather:
        loads_ns = tile.pixels * row_bytes / (_FLAT_BYTES_NS if tile.flat else _GATHERED_BYTES_NS)
        return max(products_ns, loads_ns + weights_ns)
    rows = tile.pixels * (slices_read(problem, tile.depth) if tile.depth > 1 else 1)
    rate = _NEAR_BYTES_NS if sizes_of(problem)[2] <= _NEAR_BYTES else _FAR_BYTES_NS
    step_ns = max(products_ns, max(rows * _TMA_ROW_NS, rows * row_bytes / rate) + weights_ns)
    if tile.depth == 1:
        return step_ns
    sequence_ns = products * _PRODUCT_NS + products_ns + rows * _ROW_OF_A_WARP_NS / tile.warps
    return max(step_ns, sequence_ns / active)
