"""Which forms of `swapped.cu` are worth a try, by a model of their time (docs/kernels/sparse24.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import product
from typing import Final, TypeVar

from convoy.engines.cuda.source import DIVIDING
from convoy.engines.cuda.swapped_form import (
    MOST_SHARED_PIXELS,
    MOST_STAGES,
    MOST_SUMS,
    PIXEL_BYTES,
    SHARED_BYTES,
    TAPS,
    Form,
    iterations,
)
from convoy.problem import ConvProblem

FormT = TypeVar("FormT", bound=Form)

_CLOCK_GHZ: Final = 1.7
_LOAD_BYTES_NS_PER_SM: Final = 101.0
"""Into a multiprocessor with all of them loading; clusters that share copies get no more."""

_LATENCY_NS: Final = 770.0
"""From the release of a stage to its next full one: too few stages bound an iteration by this over their number."""

_TOGETHER_NS: Final = {1: 0.0, 2: 160.0, 4: 330.0}
"""What a cluster with the same pixels costs."""

_MEETING_NS: Final = 510.0
"""What a split costs beside the way of its sums."""

_PEER_BYTES_NS_PER_SM: Final = 18.0
"""To the shared memory of other blocks."""

_TILE_NS: Final = 240.0
_STORE_BYTES_NS_PER_SM: Final = {False: 20.7, True: 40.0}
"""By the way of results: each lane's own were measured, those through shared memory are a guess: half of what loads get."""

_STAGING_NS: Final = 100.0
"""A guess too: results to shared memory, a meeting, and a tensor copy's own latency."""

_MEMORY_BYTES_NS: Final = 4200.0
_HOPEFUL: Final = 1.2
"""A kind of cluster, split, room and depth is tried where its best guess comes within this factor of the best of all."""

_START_NS: Final = 2700.0
"""Everything that happens once: 2870 of the second version, less a guess at what goes on side by side now."""

_ROOM_NS: Final = 1000.0
"""What room for the next kernel's blocks saves of it: 0.9 to 1.8 us of four layers, once the clock counted a graph's launches by
their own time (the page's table of launches a graph). The fit above is to times in which the graph's start hid it."""


def estimate_us(problem: ConvProblem, form: Form, units: int) -> float:
    """A guess in microseconds: the busiest multiprocessor's products or loads with its stores, or the memory's bytes.

    The numbers above were fitted to 364 times of sparse products on an H200 (standard deviation 9 percent;
    bench/results/pruned-nvidia-h200.csv has the best of them, commit 3fce82f).
    """
    blocks = form.each(problem) * form.depth
    tiles = -(-form.units(problem) // form.resident(units))
    products = form.product_clocks() / _CLOCK_GHZ
    box = form.halo_rows(problem.w) * form.halo
    pixels = box / TAPS if form.halo else form.pixels
    loads = (form.filters * form.filter_bytes + pixels * PIXEL_BYTES) / _LOAD_BYTES_NS_PER_SM
    # Of the stages whose products are under way, half are as good as free.
    latency = _LATENCY_NS / (form.stages - form.pending / 2) / form.depth
    store = form.filters * form.pixels * 2 / form.split / _STORE_BYTES_NS_PER_SM[form.staged > 0]
    store += _STAGING_NS if form.staged else 0.0
    if form.split > 1:
        sent = 4 * form.filters * form.pixels * (form.split - 1) / form.split
        store += sent / _PEER_BYTES_NS_PER_SM + _MEETING_NS
    loop = blocks * max(products, loads, latency) + max(0, box - form.pixels) * PIXEL_BYTES / _LOAD_BYTES_NS_PER_SM
    # Of two tiles in turn, one's stores hide the next one's loads.
    busy = tiles * (loop + store + _TILE_NS) - (tiles - 1) * min(store, loop)
    memory = problem.bytes_min / _MEMORY_BYTES_NS
    start = _START_NS + _TOGETHER_NS[form.cluster] - (_ROOM_NS if form.blocks > 1 else 0.0)
    return (max(busy, memory) + 0.1 * min(busy, memory) + start) / 1000


def forms(problem: ConvProblem, units: int, kind: type[FormT], limit: int = 16) -> list[FormT]:
    """Forms worth trying, by their guess: of each kind of cluster, split, room, depth and halo the best, then of other tiles.

    The best two whose results go through shared memory are tried without that too.
    """
    found = [
        (estimate_us(problem, form, units), index, form) for index, form in enumerate(_candidates(problem, units, kind))
    ]
    ordered = {form: guess for guess, _, form in sorted(found, key=lambda entry: entry[:2])}
    own = {replace(form, stages=0): form for form in ordered if not form.staged}
    known = [own[replace(form, stages=0, staged=0)] for form in ordered if not form.halo and form.staged][:2]
    # What sharing, splitting, room and depth bring is the least certain: each is tried where it might win.
    most = _HOPEFUL * min(ordered.values())
    hopeful = [form for form, guess in ordered.items() if guess <= most]
    chosen = _first(hopeful, lambda form: (form.cluster, form.split, form.blocks, form.depth, form.halo))
    tiles = _first(ordered, lambda form: (form.cluster, form.split, form.blocks, form.pixels, form.filters, form.halo))
    kept = set(list(dict.fromkeys([*known, *chosen, *tiles, *ordered]))[:limit])
    return [form for form in ordered if form in kept]


def _first(ordered: Iterable[FormT], kind: Callable[[FormT], tuple[int, ...]]) -> list[FormT]:
    """The first one of each kind."""
    return list({kind(form): form for form in reversed(list(ordered))}.values())[::-1]


_SHAPES: Final = ((64, 1), (64, 2), (64, 3), (128, 1), (128, 2))
"""(rows, consumers) of the forms."""

_MOST_TOGETHER: Final = 2
"""Blocks with the same pixels. Clusters of four won none of 26 layers with 2:4 weights."""


def _widths(total: int, groups: int, form: Form, units: int) -> list[int]:
    """Pixels of a tile: some round numbers, and those that fill one to three rounds of the device with nothing left over."""
    whole = 8 * form.cluster
    even = (-(-total // max(1, rounds * form.resident(units) // groups)) for rounds in (1, 2, 3))
    found = {-(-width // whole) * whole for width in (32, 64, 96, 128, 160, 192, 224, 256, *even)}
    return sorted(width for width in found if width <= 256)


def _halos(problem: ConvProblem) -> Iterator[tuple[int, int]]:
    """(columns of a row, pixels of a tile) where taps may read one copy: an image's rows in so many equal parts."""
    widths = {(problem.w // 8 + 1) * 8, problem.w + 1}
    if Form(64, problem.w + 8, 2, 1, 1, staged=1, halo=problem.w + 1).fits(problem):
        rows = {-(-problem.p // parts) for parts in range(1, problem.p + 1)}
        found = ((columns, -(-count * columns // 8) * 8) for columns in sorted(widths) for count in sorted(rows))
        yield from ((columns, pixels) for columns, pixels in found if pixels <= 256)


def _candidates(problem: ConvProblem, units: int, kind: type[FormT]) -> Iterator[FormT]:
    total = problem.n * problem.p * problem.q
    together = ((_MOST_TOGETHER, 1), *((1, split) for split in kind.splits))
    for (rows, consumers), (cluster, split) in product(_SHAPES, together):
        filters = rows * consumers
        if (filters > 64 and filters >= problem.k + 64) or (cluster > 1 and filters * (cluster - 1) >= problem.k):
            continue  # a warpgroup, or a block of the cluster, would have no filters
        shape = kind(rows, 8, 2, consumers, cluster, split=split)
        depths = (1, 2) if iterations(problem) % 2 == 0 else (1,)
        for pixels in _widths(total, -(-problem.k // (filters * cluster)), shape, units):
            if pixels < total + 32:
                for depth, blocks in product(depths, (1, 2)):
                    form = kind(rows, pixels, 2, consumers, cluster, depth, split, blocks)
                    yield from _held(form, problem, units)
                    yield from _held(_staged(form, problem, units), problem, units)
        for columns, pixels in _halos(problem) if cluster == 1 else ():
            for depth, blocks in product((1, 3), (1, 2)):
                form = kind(rows, pixels, 2, consumers, 1, depth, split, blocks, 1, columns)
                own = split > 1 and columns % 8 > 0
                yield from _held(replace(form, staged=0) if own else _staged(form, problem, units), problem, units)


def _staged(form: FormT, problem: ConvProblem, units: int) -> FormT:
    """The form with results through the ring, where each block has one tile; residuals had better come before its end."""
    alone = form.units(problem) <= form.resident(units) and (form.split > 1 or not problem.epilogue.residual)
    return replace(form, staged=2 if alone else 1)


def _held(form: FormT, problem: ConvProblem, units: int) -> Iterator[FormT]:
    """The form with a ring, if there are registers for its sums, and of a split no more tiles than run at one time."""
    fits = form.rows // 64 * form.pixels // 2 <= _most_sums(form.consumers, form.blocks, problem.epilogue.activation)
    fits &= form.blocks == 1 or form.pixels <= MOST_SHARED_PIXELS
    if fits and (form.split == 1 or form.units(problem) <= form.resident(units)):
        yield from _deep(form, problem, units)


def _most_sums(consumers: int, blocks: int, activation: str) -> int:
    """`MOST_SUMS`; none where there are no registers for so many, fewer where an activation's division wants some."""
    most = MOST_SUMS.get((consumers, blocks), 0)
    return most - 8 if consumers == 2 and activation in DIVIDING else most


def _deep(form: FormT, problem: ConvProblem, units: int) -> Iterator[FormT]:
    """The form with as many stages as there is room and work for; none where three do not fit or a block has no work."""
    if form.split > 1 and (form.split - 1) * form.each(problem) >= form.steps(problem):
        return
    room = SHARED_BYTES[form.blocks] - form.fixed_bytes
    work = form.each(problem) * -(-form.units(problem) // form.resident(units))
    stages = min(MOST_STAGES, room // (form.stage_bytes + 16), max(3, work))
    if form.cluster > 1 and stages > 3:
        stages -= stages % 2  # with an odd number, one thread alone copies a cluster's pixels
    if stages >= 3 and (form.staged < 2 or form.result_bytes <= stages * form.stage_bytes):
        yield replace(form, stages=stages)
