"""The tile configurations of `igemm_wgrad.cu` that are worth measuring, by a cost model (docs/kernels/training.md)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Final

from convoy.engines.hopper.igemm_swap_ab_limits import MOST_SPLIT, MOST_STAGES, SHARED_BYTES
from convoy.engines.hopper.igemm_wgrad_tile_config import GROUP, MOST_SHARES, IgemmWgradTile, flat, groups
from convoy.problem import ConvProblem

_CLOCK_GHZ: Final = 1.68
_PEER_BYTES_NS: Final = 18.4
_STORE_BYTES_NS: Final = 37.0
_ROOM_NS: Final = 370.0
"""As fitted to the dense products of `igemm_swap_ab.cu`; see `Rates` in `igemm_swap_ab_tile_search`."""

_LOAD_BYTES_NS: Final = 320.0
_PIXEL_BYTES_NS: Final = 220.0
_STEP_NS: Final = 89.0
_LATENCY_NS: Final = 840.0
_MEETING_NS: Final = 1350.0
_MEMORY_BYTES_NS: Final = 2575.0
_START_NS: Final = 1525.0
_REDUCE_NS: Final = 795.0
_PARTIAL_BYTES_NS: Final = 4500.0
"""Fitted to 330 timings of 22 layers on an H100; configurations twice as slow as their layer's best have a weight of a third. The
best of the first six is 0.4 percent behind the best of all in the mean, and at most 3 percent (root mean square of the logarithm
0.18). Parts of an iteration add as the root of the sum of squares; a barrier is that of a split, besides the transfer of its
sums."""

MOST_SUMS: Final = {(1, 1): (192, 256), (2, 1): (192, 256), (3, 1): (96, 192), (1, 2): (128, 192), (2, 2): (64, 64)}
"""Most sums of a thread and columns of a product, by (consumer warpgroups, blocks per multiprocessor); with more, the assembler
spills or fails."""

_SHAPES: Final = ((64, 1), (64, 2), (64, 3), (128, 1), (128, 2))
"""(rows, consumers) to try."""


def resident(form: IgemmWgradTile, units: int) -> int:
    """Clusters that run at one time, one block per multiprocessor; a cluster must fit into a GPC of 16 or 18 of them."""
    size = form.split
    if size <= 2:
        return max(1, units // size)
    return max(1, min(units * 10 // (size * 11), units // 16 * (16 // size)))


def estimate_us(problem: ConvProblem, form: IgemmWgradTile, units: int) -> float:
    """Estimated time in microseconds: the busiest multiprocessor's products, loads, exchange, stores, and memory traffic."""
    tiles = -(-form.units(problem) // resident(form, units))
    abreast = 2.0 if form.blocks > 1 and tiles > 1 else 1.0
    across = form.columns // GROUP * form.pixels * 128
    step = math.hypot(
        form.filters / GROUP * form.pixels / 16 * max(form.columns / 2, form.columns / 4 + 16) / _CLOCK_GHZ,
        (form.filters // GROUP * form.pixels * 128 + across) / _LOAD_BYTES_NS,
        0.0 if flat(problem) else across / _PIXEL_BYTES_NS,
        _LATENCY_NS / (form.stages - 0.5) / abreast,
        _STEP_NS / abreast,
    )
    loop = -(-form.iterations(problem) // (form.split * form.shares)) * step
    area = form.filters * form.columns
    store = area * (4 if form.shares > 1 else 2) / form.split / _STORE_BYTES_NS
    if form.split > 1:
        store += _MEETING_NS + 4 * area * (form.split - 1) / form.split / _PEER_BYTES_NS
    busy = tiles * (loop + store)
    time = math.hypot(busy, problem.bytes_min / _MEMORY_BYTES_NS) + _START_NS - (_ROOM_NS if form.blocks > 1 else 0.0)
    if form.shares > 1:
        time += _REDUCE_NS + 4 * form.shares * problem.weight_spec.elements / _PARTIAL_BYTES_NS
    return time / 1000


def forms(problem: ConvProblem, units: int, limit: int = 24) -> list[IgemmWgradTile]:
    """Configurations worth measuring, by rising estimate: first the best of each tile, split and share, then any.

    To the model, two warpgroups of 64 filters and one of 128 are the same; the latter are tried for the first few only.
    """
    found = [(estimate_us(problem, form, units), index, form) for index, form in enumerate(_candidates(problem, units))]
    ordered = {form: guess for guess, _, form in sorted(found, key=lambda entry: entry[:2])}
    same = (form for form in ordered if form.rows == 128 and form.consumers == 1)
    twins = dict.fromkeys(form for form in same if replace(form, rows=64, consumers=2) in ordered)
    alone = [form for form in ordered if form not in twins]
    best: dict[tuple[int | bool, ...], IgemmWgradTile] = {}
    for form in alone:
        best.setdefault((form.filters, form.columns, form.split > 1, form.shares > 1), form)
    first = list(best.values())[: limit // 2]
    wanted = [*first, *list(twins)[:2], *alone]
    kept = set(list(dict.fromkeys(wanted))[:limit])
    return [form for form in ordered if form in kept]


def _candidates(problem: ConvProblem, units: int) -> Iterator[IgemmWgradTile]:
    across, all_pixels = groups(problem), max(1, problem.n * problem.p * problem.q)
    for (rows, consumers), columns, blocks in product(_SHAPES, (64, 128, 192, 256), (1, 2)):
        filters = rows * consumers
        if filters >= problem.k + GROUP or columns // GROUP > across:
            continue  # a warpgroup, or a group of columns of every tile, would be idle
        sums, widest = MOST_SUMS.get((consumers, blocks), (0, 0))
        if rows // 64 * columns // 2 > sums or columns > widest:
            continue
        most = 1 if rows // 64 * columns > 256 else MOST_SPLIT  # an exchange of more sums spills
        for pixels, split in product((64, 128), range(1, most + 1)):
            form = IgemmWgradTile(rows, columns, pixels, 2, consumers, split, 1, blocks)
            if pixels > 64 and (form.stage_bytes > 48 << 10 or all_pixels <= pixels):
                continue
            for shares in _shares(problem, form, units):
                yield from _deep(problem, replace(form, shares=shares), units)


def _shares(problem: ConvProblem, form: IgemmWgradTile, units: int) -> list[int]:
    """One share, and the numbers that fill the device once or twice; each block has at least two iterations."""
    most = min(MOST_SHARES, form.iterations(problem) // (2 * form.split))
    filling = (rounds * resident(form, units) // form.units(problem) for rounds in (1, 2))
    return sorted({1, *(shares for shares in filling if 1 < shares <= most)})


def _deep(problem: ConvProblem, form: IgemmWgradTile, units: int) -> Iterator[IgemmWgradTile]:
    """The configuration with the most stages that shared memory and iterations allow; None below three or if a block is idle."""
    parts = form.split * form.shares
    if form.split > 1 and form.iterations(problem) < parts:
        return
    work = -(-form.iterations(problem) // parts) * (-(-form.units(problem) // resident(form, units)))
    fixed = form.shared_bytes - form.stages * (form.stage_bytes + 16)
    stages = min(MOST_STAGES, (SHARED_BYTES[form.blocks] - fixed) // (form.stage_bytes + 16), max(3, work))
    if stages >= 3 and form.inbox_bytes <= stages * form.stage_bytes:
        yield replace(form, stages=stages)
