"""A model of the time that a form of `pruned.cuda` takes, from the mask alone: in which order forms are tried. No torch here.

It counts what a block's code does (instructions, bytes that it copies, bytes of itself) and prices it with the constants below.
What they say of ten operators is in docs/kernels/pruned_cuda.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from convoy.engines.pruned.cuda_form import RESERVED_BYTES, VECTORS, Form, block_bytes, template
from convoy.engines.pruned.emit_cuda import STREAMS
from convoy.engines.pruned.walk import partition, positions
from convoy.problem import ConvProblem, WeightMask
from convoy.target import Target

CLOCKS_US: Final = 1755.0
"""Clocks of a microsecond under load."""

START_CLOCKS: Final = 3500.0
"""A launch in a graph, the first copy, the last store: what the smallest operators take, 2.0 us."""

BLOCK_CLOCKS: Final = 1200.0
"""The first copy and the last store of a block that is not a multiprocessor's first."""

ALONE_CLOCKS: Final = 3.0
"""Clocks an instruction of a warp that has no other to take turns with."""

INSTRUCTION_BYTES: Final = 16

COMMON_INSTRUCTIONS: Final = 110
"""Of every warp besides multiply-adds and results, once the kernel before has ended: seen in sm_90 code."""

CODE_CLOCKS: Final = 1 / 1.5
"""Clocks a byte of straight code that one scheduler waits for where no cache has it. So 14.6, 37.5 and 6.8 us are explained, of
operators 7, 9 and 6, and the 45 settings of the first form, each of which took 8 to 11 clocks an instruction, however many warps
ran it."""

CACHED_CLOCKS: Final = 1 / 6
"""The same where all of a kernel's code is in an instruction cache since the launch before: operators 2 to 4."""

CACHED_BYTES: Final = 128 << 10
"""Of a multiprocessor's instruction cache: operator 4, with 125 KB, takes a microsecond less than operator 5 with 260."""

INPUT_CLOCKS: Final = 1 / 24
"""Clocks a byte of input that a multiprocessor copies, with all others copying: 5.5 TB/s."""

OUTPUT_CLOCKS: Final = 1 / 16
"""The same for what it stores: 3.7 TB/s, of operator 8."""


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


@lru_cache(maxsize=2048)
def estimate_us(problem: ConvProblem, form: Form, target: Target) -> float:
    """What the model says of a form, in microseconds."""
    assert problem.mask is not None
    counts = counts_of(problem.mask, form.filters)
    layout = template(problem, form)
    blocks = layout.positions // form.tile * counts.groups
    rounds = -(-blocks // target.units)  # blocks of the busiest multiprocessor
    resident = min(_resident(form, target), rounds)
    steps = -(-max(counts.planes, 1) // form.channels)
    words = counts.words[VECTORS.index(form.vectors)]
    own = counts.values * (form.vectors + 0.25) + words
    copied = layout.span * counts.planes * max(len(layout.phases), 1)
    common = COMMON_INSTRUCTIONS + form.filters * form.vectors * (1 if form.splits > 1 else 2.5)
    # One warp: its split's part of the multiply-adds, and the copies' instructions.
    warp = own / form.splits + 2.5 * copied / form.threads + common
    issue = rounds * form.threads / 128 * warp
    # Shared memory gives a warp's word of one float in a clock, of two in two, of four in four; a broadcast in one.
    shared = rounds * form.threads / 32 / form.splits * (words * form.vectors + counts.values * 0.25)
    # Code comes line after line, but each scheduler waits for its own.
    turns = 1 if form.splits >= STREAMS else min(steps, STREAMS)
    streams = min(STREAMS, form.splits * turns, max(1, form.threads // 32))
    code = (common + own) * INSTRUCTION_BYTES
    missed = rounds if code > CACHED_BYTES else 1
    clocks_byte = CODE_CLOCKS if code * counts.groups > CACHED_BYTES else CACHED_CLOCKS
    again = (own / form.splits - own / streams) * CACHED_CLOCKS  # what other schedulers have run before
    fetch = missed * ((common + own / streams) * clocks_byte + max(again, 0.0)) * INSTRUCTION_BYTES
    multiprocessor = max(issue, shared, fetch, warp * ALONE_CLOCKS * rounds / resident)
    inputs = rounds * copied * 4 * INPUT_CLOCKS
    outputs = problem.n * problem.p * problem.q * problem.k * 4 / min(blocks, target.units) * OUTPUT_CLOCKS
    clocks = max(multiprocessor, inputs) + min(multiprocessor, inputs) / steps + outputs
    return (START_CLOCKS + (rounds / resident - 1) * BLOCK_CLOCKS + clocks) / CLOCKS_US


def _resident(form: Form, target: Target) -> int:
    """Blocks of a form that a multiprocessor holds at once."""
    by_room = (block_bytes(target) - RESERVED_BYTES) // ((form.room << 10) + RESERVED_BYTES)
    return max(1, min(by_room, 2048 // form.threads, 65536 // (form.threads * form.registers)))
