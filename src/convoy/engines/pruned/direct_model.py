"""A model of the time that a form of `pruned.direct` takes, and the forms to try by it. No torch here.

It counts what a block does (words from shared memory, instructions, bytes that it copies and sends) and prices it with the
constants below, those of `cuda_model` where they mean the same. What it says of layers is in docs/kernels/pruned_direct.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from typing import Final

import numpy as np
from numpy.typing import NDArray

from convoy.engines.pruned.cuda_form import RESERVED_BYTES, block_bytes
from convoy.engines.pruned.cuda_model import (
    CACHED_CLOCKS,
    CLOCKS_US,
    COMMON_INSTRUCTIONS,
    INPUT_CLOCKS,
    INSTRUCTION_BYTES,
    OUTPUT_CLOCKS,
    START_CLOCKS,
)
from convoy.engines.pruned.direct_form import (
    ENTRY_BYTES,
    FLAT,
    FOUR,
    LANES,
    LEAST_REGISTERS,
    REGISTERS,
    Form,
    Geometry,
)
from convoy.engines.pruned.walk import positions
from convoy.problem import ConvProblem, WeightMask
from convoy.problem.spec import DTYPE_BYTES
from convoy.target import Target

VECTORS: Final = (1, 2, 3, 4, 5, 6, 7, 8, 10, 13)
FILTERS: Final = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
SLICES: Final = (1, 2, 4, 8)
PARTS: Final = (1, 2, 4)
EACH: Final = (1, 2, 4, 8)
STEPS: Final = (1, 2, 4)

MOST_FORMS: Final = 12
MOST_OUTPUTS: Final = 8
"""Results of a thread that come from other warps and blocks: each is code of its own."""

MOST_THREADS: Final = 1024
LEAST_THREADS: Final = 64
ENOUGH_THREADS: Final = 256
"""Fewer are not made of warps with several filters, nor more of warps that share one."""

CLUSTER_CAPABILITY: Final = 90

CLUSTER_CLOCKS: Final = 900.0
"""A cluster's sums: a meeting of its blocks, and words on their way between them. A guess: half a microsecond."""

PARTS_CLOCKS: Final = 120.0
"""The same within a block."""

SEND_CLOCKS: Final = 1 / 24
"""A byte to another block's shared memory. A guess: no faster than from L2."""

FOUR_CLOCKS: Final = 60.0
"""Of a warp that has a multiprocessor to itself, for four entries: loads, and sums that wait for one another. A guess."""

POSITION_CLOCKS: Final = 6.0
"""The same for each position of a lane. A guess."""

CRAMPED: Final = 2.0
"""The same where registers are short: inputs are waited for in twos and threes. A guess."""

EXPOSED: Final = 0.3
"""Of that, what other warps do not hide although shared memory is busy. A guess that asks for more warps."""

BLOCK_CLOCKS: Final = 1500.0
"""The first copy and the last store of a block that is not a multiprocessor's first."""

LIST_CLOCKS: Final = 1000.0
"""Until the first entries are there: a block waits for them where it finds no room before the last kernel's have ended. A guess:
memory's latency, twice."""

MEMORY_CLOCKS: Final = 1 / 1900
"""Of the whole device for a byte of entries: 3.35 TB/s, as an H100 has."""

COPY_INSTRUCTIONS: Final = 5
"""Of a warp for 32 floats, one by one."""


@lru_cache(maxsize=64)
def _counts(mask: WeightMask) -> NDArray[np.int64]:
    """Non-zeros by filter and channel."""
    return positions(mask).sum(axis=(2, 3))


@lru_cache(maxsize=64)
def _nonzeros(mask: WeightMask) -> int:
    return int(_counts(mask).sum())


def most_entries(problem: ConvProblem, form: Form) -> int:
    """Entries of the longest list, at most: every filter's last four may be filled up."""
    assert problem.mask is not None
    geometry = Geometry(problem, form)
    deep = geometry.channels * form.steps
    counts = np.add.reduceat(_counts(problem.mask), np.arange(0, geometry.group_channels, deep), axis=1)
    grouped = counts.reshape(problem.groups, geometry.group_filters, -1)
    blocks = np.add.reduceat(grouped, np.arange(0, geometry.group_filters, form.filters), axis=1)
    return int(blocks.max(initial=0)) + (FOUR - 1) * form.filters * form.steps


@lru_cache(maxsize=256)
def forms(problem: ConvProblem, target: Target) -> tuple[Form, ...]:
    """Forms to try, best first by the model: of each number of positions and slices the best that finds room."""
    all_ = dict.fromkeys([*_all(problem, target), *_smallest(problem, target)])
    firsts: dict[tuple[int, int], Form] = {}
    for form in sorted(all_, key=lambda form: estimate_us(problem, form, target)):
        key = (form.vectors, form.slices)
        if key in firsts:
            continue
        if _finds_room(problem, form, target):
            firsts[key] = form
        if len(firsts) == MOST_FORMS:
            break
    return tuple(firsts.values())


def fits(problem: ConvProblem, target: Target) -> bool:
    """Whether some form finds room: the smallest ones do, or none."""
    return any(_finds_room(problem, form, target) for form in _smallest(problem, target))


def _finds_room(problem: ConvProblem, form: Form, target: Target) -> bool:
    return Geometry(problem, form).room(most_entries(problem, form)) <= block_bytes(target)


def _slices(problem: ConvProblem, target: Target) -> list[int]:
    """Slices that there may be: clusters are there since capability 9.0, and each slice has channels."""
    most = problem.c // problem.groups if target.capability >= CLUSTER_CAPABILITY else 1
    return [slices for slices in SLICES if slices <= most]


def _smallest(problem: ConvProblem, target: Target) -> Iterator[Form]:
    """One position of a lane, one filter of a slice."""
    for slices in _slices(problem, target):
        yield Form(1, slices, slices, 1, 1, 1)


def _all(problem: ConvProblem, target: Target) -> Iterator[Form]:
    """Every form that makes sense, whether it finds room or not."""
    group_channels, group_filters = problem.c // problem.groups, problem.k // problem.groups
    lines = problem.n * problem.p * problem.q
    shapes = [v for v in VECTORS if v == 1 or LANES * (v - 1) < 1.25 * lines]
    for filters, slices, parts, each in product(FILTERS, _slices(problem, target), PARTS, EACH):
        threads = LANES * filters * parts // each
        if filters % slices or filters % each or filters >= 2 * group_filters:
            continue
        if threads > MOST_THREADS or (threads < LEAST_THREADS and filters < group_filters):
            continue
        if (each > 1 and threads < ENOUGH_THREADS) or (parts > 1 and threads > ENOUGH_THREADS):
            continue
        for vectors, steps in product(shapes, STEPS):
            form = Form(vectors, filters, slices, parts, each, steps)
            if slices * parts > 1 and form.outputs > MOST_OUTPUTS:
                continue
            if slices * steps <= group_channels and (LEAST_REGISTERS + 2 * vectors) * threads <= REGISTERS:
                yield form


def estimate_us(problem: ConvProblem, form: Form, target: Target) -> float:
    """What the model says of a form, in microseconds."""
    assert problem.mask is not None
    geometry = Geometry(problem, form)
    warps = form.threads // LANES
    nonzeros = _nonzeros(problem.mask) / (problem.groups * geometry.blocks * form.slices)
    runs = form.filters * form.steps
    entries = nonzeros + min((FOUR - 1) / 2 * runs, (FOUR - 1) * nonzeros)
    rounds = -(-geometry.grid // target.units)  # blocks of the busiest multiprocessor
    most = _resident(geometry, entries, target)
    resident = max(1, min(most, rounds))
    # Shared memory gives a word for each lane in a clock, and two entries to all of them in one.
    shared = entries * (form.vectors + 0.5)
    issue = (entries * (2 * form.vectors + 4.5) + warps * (90 + 4 * form.each * form.vectors)) / 4
    floats = geometry.channels * form.steps * geometry.phases * geometry.span
    if geometry.copy != FLAT:
        issue += floats / LANES * COPY_INSTRUCTIONS / 4
    alone = entries / FOUR / warps * (FOUR_CLOCKS + POSITION_CLOCKS * form.vectors) + (form.each + form.steps) * 60
    alone *= -(-rounds // resident) * (CRAMPED if form.is_cramped else 1)
    compute = max(rounds * max(shared, issue) + EXPOSED * alone, alone)
    bytes_in = 4 * floats * rounds * INPUT_CLOCKS
    shares = form.slices * form.parts
    sums = 4 * form.filters * form.parts * LANES * form.width
    exchange = 0.0
    if shares > 1:
        own = form.filters // form.slices * form.tile
        between = CLUSTER_CLOCKS if form.slices > 1 else PARTS_CLOCKS
        moved = sums * (SEND_CLOCKS if form.slices > 1 else 1 / 128) + own * shares / LANES
        exchange = -(-rounds // resident) * between + rounds * moved
    written = DTYPE_BYTES[problem.y_dtype] * problem.n * problem.p * problem.q * problem.k
    outputs = written / min(geometry.grid, target.units) * OUTPUT_CLOCKS
    # Behind a first step's copies the others come while each warp's first filter is multiplied, and those of blocks side by side.
    first = bytes_in / (form.steps * resident)
    early = compute / (form.each if form.steps > 1 and resident == 1 else 1)
    busy = max(early, bytes_in - first) + compute - early
    begun = START_CLOCKS + (rounds / resident - 1) * BLOCK_CLOCKS + (form.steps - 1) * 80
    fetch = (_instructions(geometry) - COMMON_INSTRUCTIONS) * INSTRUCTION_BYTES * CACHED_CLOCKS * rounds / resident
    lists = (
        0.0 if most > resident else LIST_CLOCKS + ENTRY_BYTES * entries * geometry.grid / geometry.tiles * MEMORY_CLOCKS
    )
    return (begun + first + busy + exchange + outputs + fetch + lists) / CLOCKS_US


def _instructions(geometry: Geometry) -> int:
    """Of the code that is run once the kernel before has ended: seen in sm_90 code."""
    form = geometry.form
    rounds = -(-geometry.span // geometry.along)
    copies = 30 if geometry.copy == FLAT else 60 + 22 * rounds
    results = 50 + 45 * form.outputs if form.slices * form.parts > 1 else 25 * form.vectors
    return 80 + 9 * form.vectors + copies + results


def _resident(geometry: Geometry, entries: float, target: Target) -> int:
    """Blocks of a form that a multiprocessor holds at once."""
    form = geometry.form
    room = geometry.list_bytes + ENTRY_BYTES * entries * 1.2 + 4 * geometry.head + RESERVED_BYTES
    by_room = int((block_bytes(target) + RESERVED_BYTES) // room)
    return min(by_room, 2048 // form.threads, REGISTERS // (form.threads * form.registers), 32)
