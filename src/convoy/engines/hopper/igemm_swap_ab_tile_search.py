"""Tile configurations of `igemm_swap_ab.cu` that are worth measuring, by a cost model (docs/kernels/hopper.md, sparse24.md)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from operator import itemgetter
from typing import Final, TypeVar

from convoy.engines.hopper.igemm_swap_ab_limits import (
    MOST_SHARED_PIXELS,
    MOST_STAGES,
    ROW_BYTES,
    SHARED_BYTES,
    TAPS,
    most_sums,
)
from convoy.engines.hopper.igemm_swap_ab_tile_config import SwapAbTile, iterations
from convoy.engines.hopper.nvrtc_source import DIVIDING
from convoy.problem import ConvProblem, Epilogue

FormT = TypeVar("FormT", bound=SwapAbTile)


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates of a device and of the kernel's products in the cost model.

    Attributes:
        clock_ghz: of the tensor cores.
        load_bytes_ns: into one multiprocessor while all load; clusters that share copies get no more.
        pixel_bytes_ns: the same for pixels, whose rows are copied one by one; each block of a cluster copies a share.
        step_ns: of an iteration besides its products: wait, begin, release.
        latency_ns: from the release of a stage until it is full again. Divided by the stages, it bounds an iteration from below.
        abreast: factor on steps and latencies if two blocks of a multiprocessor have a tile each.
        together_ns: extra time of a cluster with the same pixels.
        meeting_ns: extra time of a split besides the transfer of its sums.
        peer_bytes_ns: to the shared memory of other blocks.
        tile_ns: of each tile.
        store_bytes_ns: of results that each lane stores, and of results through shared memory.
        staging_ns: for results through shared memory: the write, a barrier, and the latency of a TMA store.
        hidden: fraction of the shorter of a tile's stores and loop that overlaps with the other one, for tiles in turn.
        memory_bytes_ns: of the memory traffic.
        start_ns: once for each launch.
        room_ns: how much of it is saved if the next kernel's blocks can start early.
        sharp: whether concurrent parts take the time of the slowest; otherwise they add as the root of the sum of squares.
    """

    clock_ghz: float
    load_bytes_ns: float
    pixel_bytes_ns: float
    step_ns: float
    latency_ns: float
    abreast: float
    together_ns: Mapping[int, float]
    meeting_ns: float
    peer_bytes_ns: float
    tile_ns: float
    store_bytes_ns: tuple[float, float]
    staging_ns: float
    hidden: float
    memory_bytes_ns: float
    start_ns: float
    room_ns: float
    sharp: bool

    def felt(self, *values: float) -> float:
        """Time of parts that run concurrently."""
        return max(values) if self.sharp else math.hypot(*values)


_SPARSE: Final = Rates(
    clock_ghz=1.7, load_bytes_ns=101.0, pixel_bytes_ns=math.inf, step_ns=0.0, latency_ns=770.0, abreast=1.0,
    together_ns={1: 0.0, 2: 160.0, 4: 330.0}, meeting_ns=510.0, peer_bytes_ns=18.0, tile_ns=240.0,
    store_bytes_ns=(20.7, 40.0), staging_ns=100.0, hidden=1.0, memory_bytes_ns=4200.0, start_ns=2700.0, room_ns=1000.0,
    sharp=True,
)  # fmt: skip
"""Fitted to 364 times of sparse products on an H200 (standard deviation 9 percent; bench/results/pruned-nvidia-h200.csv has the
best of them, commit 3fce82f).

The rate and the latency of results through shared memory are guesses: half of those of loads. The start is the 2870 ns of the
second version, less a guess for what overlaps since then. `room_ns` is 0.9 to 1.8 us over four layers, measured once the clock
timed a graph's launches individually (docs/kernels/sparse-weights.md, launches of a graph). In the times of this fit, the
graph's start hid it.
"""

_DENSE: Final = Rates(
    clock_ghz=1.68, load_bytes_ns=203.0, pixel_bytes_ns=139.0, step_ns=78.0, latency_ns=860.0, abreast=2.0,
    together_ns={1: 0.0, 2: 260.0, 4: 520.0}, meeting_ns=0.0, peer_bytes_ns=18.4, tile_ns=0.0,
    store_bytes_ns=(37.0, 69.0), staging_ns=0.0, hidden=0.5, memory_bytes_ns=3100.0, start_ns=1580.0, room_ns=370.0,
    sharp=False,
)  # fmt: skip
"""Fitted to 1067 times of dense products on an H100 (27 layers, fp16, batches 1 and 32): root of the mean squared relative error
9 percent, 11 for layers that were left out; 18 with the rates of sparse products (docs/kernels/hopper.md).

Each rate is that of a part which runs alone. Parts never do: if two take equally long, the time is 1.4 times that of one. Terms
for a tile, its way through shared memory and a split's barriers, besides their bytes, did not improve the fit. The extra time
of a cluster of four is a guess.
"""

_HOPEFUL: Final = 1.2
"""A kind of configuration is tried if its best estimate is within this factor of the best of all."""


def estimate_us(problem: ConvProblem, form: SwapAbTile, units: int) -> float:
    """Estimated time in microseconds: the busiest multiprocessor's products, loads and stores, and the memory traffic."""
    rounds = -(-form.units(problem) // form.resident(units))
    return _with_memory_us(form, _busy_ns(form, problem.w, form.each(problem), rounds), problem.bytes_min)


def _with_memory_us(form: SwapAbTile, busy: float, moved: int) -> float:
    """The whole launch, from the busiest multiprocessor's time and the bytes moved."""
    rates = _SPARSE if form.sparse else _DENSE
    memory = moved / rates.memory_bytes_ns
    start = rates.start_ns + rates.together_ns[form.cluster] - (rates.room_ns if form.blocks > 1 else 0.0)
    return (rates.felt(busy, memory) + (0.1 * min(busy, memory) if rates.sharp else 0.0) + start) / 1000


def _busy_ns(form: SwapAbTile, width: int, each: int, tiles: int) -> float:
    """Time of the busiest multiprocessor, which has so many tiles, with `each` iterations of a block for one of them.

    It depends on nothing of the epilogue. `width`: columns of an image.
    """
    rates = _SPARSE if form.sparse else _DENSE
    blocks = each * form.depth
    box = form.halo_rows(width) * form.halo
    row = ROW_BYTES * form.planes
    pixels = (box / TAPS if form.halo else form.pixels) * row
    abreast = form.depth * (rates.abreast if form.blocks > 1 and tiles > 1 else 1.0)
    block = rates.felt(
        form.product_clocks() / rates.clock_ghz,
        (form.filters * form.filter_bytes + pixels) / rates.load_bytes_ns,
        pixels / form.cluster / rates.pixel_bytes_ns,
        # Of the stages whose products are in flight, half count as free.
        rates.latency_ns / (form.stages - form.pending / 2) / abreast,
        rates.step_ns / abreast,
    )
    loop = blocks * block + max(0, box - form.pixels) * row / rates.load_bytes_ns
    store = form.filters * form.pixels * (4 if form.wide else 2) / form.split / rates.store_bytes_ns[form.staged > 0]
    store += rates.staging_ns if form.staged else 0.0
    if form.split > 1:
        sent = 4 * form.filters * form.pixels * (form.split - 1) / form.split
        store += sent / rates.peer_bytes_ns + rates.meeting_ns
    # With two tiles in turn, the stores of one overlap with the loads of the next.
    return tiles * (loop + store + rates.tile_ns) - (tiles - 1) * rates.hidden * min(store, loop)


def forms(problem: ConvProblem, units: int, kind: type[FormT], limit: int = 16) -> list[FormT]:
    """Configurations worth measuring, by rising estimate."""
    moved = problem.bytes_min  # a thousand estimates need it
    timed = _timed_candidates(_without_likes(problem), units, kind)
    ordered = dict(sorted(((form, _with_memory_us(form, busy, moved)) for form, busy in timed), key=itemgetter(1)))
    wanted = _sparse_first(ordered) if kind.sparse else _dense_first(ordered)
    kept = set(list(dict.fromkeys(wanted))[:limit])
    return [form for form in ordered if form in kept]


def _hopeful(ordered: Mapping[FormT, float]) -> list[FormT]:
    most = _HOPEFUL * min(ordered.values())
    return [form for form, guess in ordered.items() if guess <= most]


def _dense_first(ordered: Mapping[FormT, float]) -> list[FormT]:
    """One of each tile's equivalent configurations: first the best by number of filters and way of storing, then by estimate.

    With a halo three taps an iteration are always faster than one (25 pairs, 11 percent), and rows of one column more than the
    image are faster than rows that are multiples of eight (51 of 62 pairs, 2 percent). Results take as long through the ring
    buffer as through memory of their own (19 pairs).
    """
    alone: dict[tuple[int, ...], FormT] = {}
    for form in ordered:
        tile = (form.pixels // form.halo, 0) if form.halo else (form.pixels, form.depth)
        alone.setdefault((form.filters, form.cluster, form.split, form.blocks, form.halo > 0, *tile), form)
    best: dict[tuple[int, bool, bool], FormT] = {}
    for form in _hopeful({form: ordered[form] for form in alone.values()}):
        best.setdefault((form.filters, form.staged > 0, form.halo > 0), form)
    return [*best.values(), *alone.values()]


def _sparse_first(ordered: Mapping[FormT, float]) -> list[FormT]:
    """First the best of each kind of cluster, split, blocks per multiprocessor, depth and halo, then the best of other tiles.

    The best two whose results go through shared memory are tried without that too.
    """
    own = {replace(form, stages=0): form for form in ordered if not form.staged}
    known = [own[replace(form, stages=0, staged=0)] for form in ordered if not form.halo and form.staged][:2]
    # The benefit of clusters, splits, blocks per multiprocessor and depth is the least certain, so each is tried.
    chosen = _first(_hopeful(ordered), lambda form: (form.cluster, form.split, form.blocks, form.depth, form.halo))
    tiles = _first(ordered, lambda form: (form.cluster, form.split, form.blocks, form.pixels, form.filters, form.halo))
    return [*known, *chosen, *tiles, *ordered]


def _first(ordered: Iterable[FormT], kind: Callable[[FormT], tuple[int, ...]]) -> list[FormT]:
    """The first of each kind; kinds whose last value is best come first."""
    return list({kind(form): form for form in reversed(list(ordered))}.values())[::-1]


_SHAPES: Final = ((64, 1), (64, 2), (64, 3), (128, 1), (128, 2))
"""(rows, consumers) to try."""

_MOST_TOGETHER: Final = 2
"""Most blocks with the same pixels. Clusters of four won none of 26 layers with 2:4 weights."""


def _widths(total: int, groups: int, form: SwapAbTile, units: int) -> list[int]:
    """Pixels of a tile: some round numbers, and those that fill one to three rounds of the device completely."""
    whole = 8 * form.cluster
    even = (-(-total // max(1, rounds * form.resident(units) // groups)) for rounds in (1, 2, 3))
    found = {-(-width // whole) * whole for width in (32, 64, 96, 128, 160, 192, 224, 256, *even)}
    return sorted(width for width in found if width <= 256)


def _halos(problem: ConvProblem, kind: type[SwapAbTile]) -> Iterator[tuple[int, int]]:
    """(columns of a row, pixels of a tile) with which all taps can read one copy: an image's rows in equal parts."""
    widths = {(problem.w // 8 + 1) * 8, *([problem.w + 1] if kind.odd_rows else [])}
    if SwapAbTile(64, problem.w + 8, 2, 1, 1, staged=1, halo=problem.w + 1).fits(problem):
        rows = {-(-problem.p // parts) for parts in range(1, problem.p + 1)}
        found = ((columns, -(-count * columns // 8) * 8) for columns in sorted(widths) for count in sorted(rows))
        yield from ((columns, pixels) for columns, pixels in found if pixels <= 256)


def _without_likes(problem: ConvProblem) -> ConvProblem:
    """The problem with the parts of its epilogue that decide on candidates, so that layers which differ in others share them."""
    activation = problem.epilogue.activation
    kept = activation if activation in DIVIDING else "none"
    return replace(problem, epilogue=Epilogue(residual=problem.epilogue.residual, activation=kept), mask=None)


@lru_cache(maxsize=32)
def _timed_candidates(problem: ConvProblem, units: int, kind: type[FormT]) -> tuple[tuple[FormT, float], ...]:
    width = problem.w
    return tuple((form, _busy_ns(form, width, each, tiles)) for form, each, tiles in _candidates(problem, units, kind))


def _candidates(problem: ConvProblem, units: int, kind: type[FormT]) -> Iterator[tuple[FormT, int, int]]:
    """Configurations, each with the iterations of a block for one tile, and the tiles of the busiest multiprocessor."""
    total = problem.n * problem.p * problem.q
    halos = list(_halos(problem, kind))
    depths = (1, 2) if iterations(problem) % 2 == 0 and kind.planes == 1 else (1,)
    together = dict.fromkeys([(_MOST_TOGETHER if kind.planes == 1 else 1, 1), *((1, split) for split in kind.splits)])
    for (rows, consumers), (cluster, split) in product(_SHAPES, together):
        filters = rows * consumers
        if (filters > 64 and filters >= problem.k + 64) or (cluster > 1 and filters * (cluster - 1) >= problem.k):
            continue  # a warpgroup, or a block of the cluster, would have no filters
        shapes = [kind(rows, 8, 2, consumers, cluster, split=split, blocks=blocks) for blocks in (1, 2)]
        splits, divides = kind.planes > 1 and split > 1, problem.epilogue.activation in DIVIDING
        limits = [(f, most_sums(consumers, f.blocks, divides, splits=splits), f.resident(units)) for f in shapes]
        for pixels in _widths(total, -(-problem.k // (filters * cluster)), shapes[0], units):
            if pixels < total + 32:
                held = _held(kind(rows, pixels, 2, consumers, cluster, split=split), limits, problem)
                for depth, (blocks, tiles) in product(depths, held):
                    form = kind(rows, pixels, 2, consumers, cluster, depth, split, blocks)
                    staged = (0,) if kind.wide else (0, _staging(form, problem, tiles))
                    yield from _deep(form, staged, problem, tiles)
        for columns, pixels in halos if cluster == 1 else ():
            held = _held(kind(rows, pixels, 2, consumers, 1, split=split, halo=columns), limits, problem)
            for depth, (blocks, tiles) in product((1, 3) if kind.planes == 1 else (1,), held):
                form = kind(rows, pixels, 2, consumers, 1, depth, split, blocks, 0, columns)
                own = kind.wide or (split > 1 and columns % 8 > 0)
                yield from _deep(form, (0 if own else _staging(form, problem, tiles),), problem, tiles)


def _staging(form: SwapAbTile, problem: ConvProblem, tiles: int) -> int:
    """Ways of storing results: through the ring buffer if each block has one tile; residuals are better loaded before its end."""
    return 2 if tiles == 1 and (form.split > 1 or not problem.epilogue.residual) else 1


def _held(
    tile: SwapAbTile, limits: Sequence[tuple[SwapAbTile, int, int]], problem: ConvProblem
) -> list[tuple[int, int]]:
    """Blocks per multiprocessor whose registers hold a tile's sums, each with the tiles of the busiest multiprocessor.

    A split has no more tiles than run at one time. `limits`: for each number of blocks a form, its most sums, and its clusters
    that run at one time.
    """
    sums, groups = tile.sums, tile.units(problem)
    fitting = [(f.blocks, -(-groups // resident)) for f, most, resident in limits if sums <= most]
    widest = 2 if tile.pixels <= MOST_SHARED_PIXELS else 1
    return [(blocks, tiles) for blocks, tiles in fitting if blocks <= widest and (tile.split == 1 or tiles == 1)]


def _deep(form: FormT, ways: Sequence[int], problem: ConvProblem, tiles: int) -> Iterator[tuple[FormT, int, int]]:
    """The configuration with each way of storing, and as many stages as the shared memory and the iterations allow.

    None if three do not fit or a block has no iterations.
    """
    each = form.each(problem)
    if form.split > 1 and (form.split - 1) * each >= form.steps(problem):
        return
    left, stage_bytes, work = SHARED_BYTES[form.blocks] - form.fixed_bytes, form.stage_bytes, max(3, each * tiles)
    for staged in ways:
        results = form.result_bytes if staged else 0
        stages = min(MOST_STAGES, (left - (results if staged == 1 else 0)) // (stage_bytes + 16), work)
        if form.cluster > 1 and stages > 3:
            stages -= stages % 2  # with an odd number, a single thread copies a cluster's pixels
        if stages >= 3 and (staged < 2 or results <= stages * stage_bytes):
            yield form.filled(stages, staged), each, tiles
