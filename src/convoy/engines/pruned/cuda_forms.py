"""The forms that `pruned.cuda` may give a layer's code, and a model of their time: what the search tries, in which order.

The model counts what a block's code does (instructions, bytes that it copies, bytes of itself) from the mask, and prices it
with the constants below. Its terms, and what they say of ten operators, are in docs/kernels/pruned_cuda.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from convoy.engines.base import Knobs
from convoy.engines.pruned.layout import Layout, lay_out
from convoy.engines.pruned.walk import partition, positions, used_channels, used_taps
from convoy.errors import InputError
from convoy.problem import ConvProblem, WeightMask
from convoy.target import Target

CODE_BYTES: Final = 24 << 10
"""A barrier after so much code, about, keeps a block's warps together in the instruction cache (NVIDIA, "reducing instruction
cache misses")."""

SHARED_BYTES: Final = {80: 163 << 10, 87: 163 << 10, 90: 227 << 10, 100: 227 << 10, 103: 227 << 10}
"""Shared memory of a block by compute capability (CUDA C++ Programming Guide, table of technical specifications); 99 KB
elsewhere."""

RESERVED_BYTES: Final = 1 << 10
"""What the system keeps of it for each block."""

SPARE_REGISTERS: Final = (72, 96)
"""Registers besides the sums, at least and at most: addresses, and loads under way. With 64 besides 64 sums ptxas spilled."""

MOST_THREADS: Final = 512
"""Of a block: each can have 128 registers then."""

MOST_STEPS: Final = 8

STEP_FMAS: Final = 64
"""Multiply-adds of a thread in one step, at least: a barrier costs as much as some ten."""

MOST_FMAS: Final = 400_000
"""Multiply-add instructions of one form, at most: at a third of a millisecond each, ten seconds of 16 cores."""

SPACE_FMAS: Final = 1_000_000
"""The same of all forms of a space."""

MOST_FORMS: Final = 16

LANES: Final = (32, 64, 128, 256, 384, 512)
FILTERS: Final = (4, 8, 16, 32, 64)
SPLITS: Final = (1, 2, 4, 8, 16)
VECTORS: Final = (1, 2, 4)

CLOCKS_US: Final = 1755.0
"""Clocks of a microsecond under load."""

LAUNCH_US: Final = 1.6
"""A kernel in a graph that does next to nothing (1.14, measured), and its last stores."""

FETCH_US: Final = 0.7
"""From the first copy's address to its data behind a barrier."""

ALONE_CLOCKS: Final = 3.0
"""Clocks an instruction of a warp that has no other to take turns with."""

CODE_CLOCKS: Final = 1 / 12
"""Clocks a byte of code that a multiprocessor fetches."""

INPUT_CLOCKS: Final = 1 / 24
"""Clocks a byte of input that a multiprocessor copies, with all others copying: 5.5 TB/s."""

OUTPUT_CLOCKS: Final = 1 / 11
"""The same for what it stores: 2.5 TB/s."""


@dataclass(frozen=True, slots=True)
class Form:
    """Settings of one kernel.

    Attributes:
        lanes: threads that go along a tile's pixels.
        vectors: neighbouring pixels of a thread.
        filters: filters of a group, at most: a thread has `filters * vectors` sums.
        splits: warps that compute different taps of the same pixels, in units of `lanes` threads.
        channels: input channels of a step, at most.
        room: shared memory for steps, in KB.
        resident: blocks that a multiprocessor should hold at once.
    """

    lanes: int
    vectors: int
    filters: int
    splits: int
    channels: int
    room: int
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
        return self.room << 10

    @property
    def code_bytes(self) -> int:
        """Code of a step, in the walk's own measure: bytes of each split, if a thread had one pixel."""
        return CODE_BYTES * self.splits // self.vectors

    @property
    def registers(self) -> int:
        """Registers of a thread, at most."""
        wanted = max(128, self.filters * self.vectors + SPARE_REGISTERS[1])
        return min(wanted, 65536 // (self.threads * self.resident) // 8 * 8)

    @property
    def knobs(self) -> Knobs:
        """What does not follow from the problem and the device."""
        return Knobs.of(lanes=self.lanes, vectors=self.vectors, filters=self.filters, splits=self.splits)


def block_bytes(target: Target) -> int:
    """Shared memory that a block can have."""
    return SHARED_BYTES.get(target.capability, 99 << 10)


@dataclass(frozen=True, slots=True)
class Counts:
    """What a group of filters costs, the largest of a layer.

    Attributes:
        groups: groups of the layer.
        values: non-zeros of the largest group.
        words: words of inputs that it loads, for a thread of 1, 2 or 4 pixels: by `VECTORS`.
        planes: planes that it reads.
    """

    groups: int
    values: int
    words: tuple[int, ...]
    planes: int


@lru_cache(maxsize=256)
def counts_of(mask: WeightMask, filters: int) -> Counts:
    """Count a mask's groups of so many filters."""
    nonzero = positions(mask)
    groups = partition(nonzero, filters)
    sizes = nonzero.sum(axis=(1, 2, 3))
    values = [int(sizes[group].sum()) for group in groups]
    used = nonzero[groups[int(np.argmax(values))]].any(axis=0) if values else np.zeros((1, 1, 1), bool)
    words = tuple(_words(used, vectors) for vectors in VECTORS)
    return Counts(len(groups), max(values, default=0), words, int(used.any(axis=(1, 2)).sum()))


def _words(used: NDArray[np.bool_], vectors: int) -> int:
    """Words that hold the used taps of each row, for a thread whose first pixel begins a word: of stride 1."""
    columns = used.shape[-1]
    words = np.zeros((*used.shape[:-1], columns + 2), bool)
    for column in range(columns):
        for word in {column // vectors, (column + vectors - 1) // vectors}:
            words[..., word] |= used[..., column]
    return int(words.sum())


def template(problem: ConvProblem, form: Form) -> Layout:
    """The template of a form: one block that holds the whole batch."""
    assert problem.mask is not None
    taps, channels = _reads(problem.mask, problem.groups)
    return lay_out(problem, taps, channels, tile=form.tile, images=problem.n, rows=problem.p, align=form.vectors)


@lru_cache(maxsize=64)
def _reads(mask: WeightMask, groups: int) -> tuple[list[tuple[int, int]], tuple[int, ...]]:
    """Taps and input channels that some filter reads."""
    nonzero = positions(mask)
    return used_taps(nonzero), used_channels(nonzero, groups)


def forms(problem: ConvProblem, target: Target) -> list[Form]:
    """Forms to try, best first by the model: of each number of sums the best, and more of the best of all.

    As many as `MOST_FORMS`, and fewer the more code they write.
    """
    assert problem.mask is not None
    found = sorted(_all(problem, target), key=lambda form: estimate_us(problem, form, target))
    firsts: dict[tuple[int, int], Form] = {}
    for form in found:
        firsts.setdefault((form.vectors, form.filters), form)
    near = [form for form in found if found and (form.vectors, form.filters) == (found[0].vectors, found[0].filters)]
    wanted = dict.fromkeys([*firsts.values(), *near])
    chosen: list[Form] = []
    fmas = 0
    for form in sorted(wanted, key=found.index):
        fmas += problem.mask.nonzeros * form.vectors
        if len(chosen) == MOST_FORMS or (len(chosen) >= 2 and fmas > SPACE_FMAS):
            break
        chosen.append(form)
    return chosen


def form_of(problem: ConvProblem, knobs: Knobs, target: Target) -> Form:
    """The form that knobs name; raises InputError where it does not fit the problem or the device."""
    numbers = {name: knobs.integer(name) for name in ("lanes", "vectors", "filters", "splits")}
    expected = "settings of the engine's space for this problem and device"
    if min(numbers.values()) < 1 or numbers["vectors"] not in VECTORS:
        raise InputError("knobs", str(knobs), expected)
    form = _fitted(problem, Form(**numbers, channels=1, room=1, resident=1), target)
    if form is None:
        raise InputError("knobs", str(knobs), expected)
    return form


def _all(problem: ConvProblem, target: Target) -> Iterator[Form]:
    """Every form that fits the device."""
    assert problem.mask is not None
    pixels = problem.n * problem.p * problem.q
    for vectors in VECTORS:
        if vectors > 1 and problem.mask.nonzeros * vectors > MOST_FMAS:
            continue
        for lanes in LANES:
            if lanes > 64 and (lanes // 2) * vectors >= pixels * 1.3:
                continue  # half of the threads would be enough; 64 suit the smallest
            for filters in FILTERS:
                if (filters > FILTERS[0] and filters // 2 >= problem.k) or filters * vectors > 128:
                    continue
                for splits in SPLITS:
                    if lanes * splits < 64:
                        continue
                    form = _fitted(problem, Form(lanes, vectors, filters, splits, 1, 1, 1), target)
                    if form is not None:
                        yield form


def _fitted(problem: ConvProblem, form: Form, target: Target) -> Form | None:
    """A form with its steps: as few as shared memory has room for at once, else two of them; None where it does not fit."""
    assert problem.mask is not None
    counts = counts_of(problem.mask, form.filters)
    if form.threads > MOST_THREADS or _is_cramped(form):
        return None
    if form.splits > 1 and counts.values < 8 * form.splits:
        return None
    layout = template(problem, form)
    phases = max(len(layout.phases), 1)
    most = block_bytes(target) - RESERVED_BYTES
    if form.splits * form.filters * form.tile * 4 > most:
        return None
    # Two blocks on a multiprocessor where there are blocks enough, and threads to spare.
    blocks = layout.positions // form.tile * counts.groups
    resident = 2 if blocks > target.units and not _is_cramped(replace(form, resident=2)) else 1
    most = most // resident - (resident - 1) * RESERVED_BYTES
    channels = max(len(layout.channels), 1)
    whole = (layout.span * phases + counts.values / channels + 4) * 4
    room = int(most / whole)
    if room < min(channels, 2):
        return None
    # Several steps, so that the first begins early, where each has enough to do for its barrier.
    steps = max(1, min(MOST_STEPS, int(counts.values * form.vectors / (form.splits * STEP_FMAS))))
    wanted = -(-channels // steps)
    if channels > room:
        wanted = min(wanted, max(1, room // 4))
    return replace(form, channels=wanted, room=most >> 10, resident=resident)


def _is_cramped(form: Form) -> bool:
    """Whether a thread has fewer registers than its sums want."""
    return form.registers < form.filters * form.vectors + SPARE_REGISTERS[0]


@lru_cache(maxsize=2048)
def estimate_us(problem: ConvProblem, form: Form, target: Target) -> float:
    """What the model says of a form, in microseconds."""
    assert problem.mask is not None
    counts = counts_of(problem.mask, form.filters)
    layout = template(problem, form)
    tiles = layout.positions // form.tile
    blocks = tiles * counts.groups
    rounds = -(-blocks // target.units)  # blocks of the busiest multiprocessor
    warps = form.threads / 32
    # One warp: its split's part of the multiply-adds, of the loads, and the copies' instructions.
    words = counts.words[VECTORS.index(form.vectors)]
    share = 1 / form.splits
    code = counts.values * (form.vectors + 0.25) + words + 2 * form.filters * form.vectors
    copied = layout.span * counts.planes * max(len(layout.phases), 1)
    warp = code * share + 3 * copied / form.threads + 60 + form.filters * (form.splits > 1) * 6
    issue = rounds * warps / 4 * warp
    # Shared memory gives a warp's word of one float in a clock, of two in two, of four in four; a broadcast in one.
    shared = rounds * warps * share * (words * form.vectors + counts.values * 0.25)
    fetch = rounds * code * 16 * CODE_CLOCKS
    multiprocessor = max(issue, shared, fetch, warp * ALONE_CLOCKS * max(1, rounds / _resident(form, target)))
    inputs = rounds * copied * 4 * INPUT_CLOCKS
    pixels = problem.n * problem.p * problem.q
    outputs = pixels * problem.k * 4 / min(blocks, target.units) * OUTPUT_CLOCKS
    steps = -(-max(counts.planes, 1) // form.channels)
    clocks = max(multiprocessor, inputs) + min(multiprocessor, inputs) / steps + outputs
    return LAUNCH_US + FETCH_US + clocks / CLOCKS_US


def _resident(form: Form, target: Target) -> int:
    """Blocks of a form that a multiprocessor holds at once."""
    by_room = (block_bytes(target) - RESERVED_BYTES) // ((form.room << 10) + RESERVED_BYTES)
    return max(1, min(by_room, 2048 // form.threads, 65536 // (form.threads * form.registers)))
