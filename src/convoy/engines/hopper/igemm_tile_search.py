"""The tile configurations of `igemm.cu` that are worth measuring, ordered by a cost model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from convoy.engines.hopper.igemm_tile_config import EXTRA_BYTES, MOST_STAGES, SHARED_BYTES, IgemmTile, iterations
from convoy.engines.hopper.tensor_maps import ROW_BYTES
from convoy.problem import ConvProblem
from convoy.problem.spec import DTYPE_BYTES

_FLOPS_NS_PER_SM = {2: 5200.0, 4: 2600.0}
_LOAD_BYTES_NS_PER_SM = 78.0
_STEP_NS = 120.0
_PAIR_NS = 175.0
_TILE_NS = 150.0
_STORE_BYTES_NS_PER_SM = 62.0
_START_NS = 1210.0
"""The rates and latencies above are those of operations, loads from L2, the shortest iteration, the extra wait in a cluster of
two, the gap between two tiles, stores, and the launch. Their ratios are fitted to 56 timings of plain layers on an H100, their
scale to 2118 rows of an H200 (root mean square error 18 %, batches of 1 to 128)."""

_PEER_BYTES_NS_PER_SM = 24.0
"""Rate of stores to the shared memory of another block: 3.2 TB/s over 132 multiprocessors (measured)."""

_MEETING_NS = 400.0
"""A barrier of a cluster, and the latency to another block's shared memory."""

_CACHED_BYTES = 24e6
_CACHE_BYTES_NS = 6000.0
_MEMORY_BYTES_NS = 3000.0
"""Bytes of a layer's tensors that stay in L2, and the rates of L2 and of memory; fitted to the same rows."""


def estimate_us(problem: ConvProblem, form: IgemmTile, units: int) -> float:
    """Estimated time in microseconds, from the busiest multiprocessor (products or loads, last store) and the memory traffic."""
    each = DTYPE_BYTES[problem.x_dtype]
    steps = form.each(problem)
    rounds = -(-form.units(problem) // form.resident(units))
    columns = max(form.filters, 64)  # narrower products run no faster: the first operand's reads bind
    products = 2 * form.pixels * columns * (ROW_BYTES // each) / _FLOPS_NS_PER_SM[each]
    loads = (form.pixels + form.filters / form.cluster) * ROW_BYTES / _LOAD_BYTES_NS_PER_SM
    step = max(products, loads, _STEP_NS) + (_PAIR_NS if form.cluster > 1 else 0.0)
    store = form.pixels * form.filters * each / form.split / _STORE_BYTES_NS_PER_SM
    if form.split > 1:
        store += _MEETING_NS + 4 * form.pixels * form.filters / _PEER_BYTES_NS_PER_SM
    hidden = min(store, steps * step) if form.turns and form.consumers > 1 else 0.0
    busy = rounds * (steps * step + store - hidden + _TILE_NS) + hidden
    # Both add to the time where they are of about the same size.
    cached = min(problem.bytes_min, _CACHED_BYTES)
    moved = cached / _CACHE_BYTES_NS + (problem.bytes_min - cached) / _MEMORY_BYTES_NS
    return (math.hypot(busy**2, moved**2) ** 0.5 + _START_NS) / 1000


def forms(problem: ConvProblem, units: int, limit: int = 28) -> list[IgemmTile]:
    """Configurations worth measuring, by rising estimate; at most three for each tile size."""
    found = sorted(
        ((estimate_us(problem, form, units), index, form) for index, form in enumerate(_candidates(problem))),
        key=lambda entry: entry[:2],
    )
    kept: dict[tuple[int, int], int] = {}
    chosen: list[IgemmTile] = []
    for _, _, form in found:
        tile = (form.pixels, form.filters)
        if kept.get(tile, 0) < 3 and len(chosen) < limit:
            kept[tile] = kept.get(tile, 0) + 1
            chosen.append(form)
    return chosen


_SHAPES = ((64, 2, False), (128, 2, False), (64, 3, False), (64, 2, True), (128, 2, True), (64, 1, False))
"""(rows, consumers, turns) to try."""


def _candidates(problem: ConvProblem) -> Iterator[IgemmTile]:
    widths: set[int] = set()
    for parts in range(1, 9):  # equal parts of the filters waste no columns
        share = math.ceil(problem.k / parts)
        width = -(-share // 16) * 16
        if 32 <= width <= 256 or (parts == 1 and width < 32):
            widths.add(width)
    widths |= {w for w in (32, 64, 128, 256) if w < 2 * problem.k}
    for width in sorted(widths):
        for rows, consumers, turns in _SHAPES:
            if rows // 64 * width > (192 if consumers == 3 else 384) or rows // 64 * width // 2 > 192:
                continue  # more accumulators than a thread has registers for
            for cluster, split in ((1, 1), (2, 1), *((1, split) for split in (2, 3, 4, 6, 8) if not turns)):
                form = IgemmTile(rows, width, 2, consumers, turns, cluster, split)
                if form.cluster > 1 and form.units(problem) == 1:
                    continue
                if (split - 1) * form.each(problem) < iterations(problem):
                    form = replace(form, stages=_depth(form, problem))
                    if split == 1 or form.sum_bytes <= form.ring_bytes:
                        yield form


def _depth(form: IgemmTile, problem: ConvProblem) -> int:
    """The most stages that fit. A split needs no more than its iterations, but enough to hold the other blocks' sums."""
    deep = min(MOST_STAGES, (SHARED_BYTES - EXTRA_BYTES) // (form.stage_bytes + 16))
    if form.split == 1:
        return deep
    return min(deep, max(2, form.each(problem), -(-form.sum_bytes // form.stage_bytes)))
