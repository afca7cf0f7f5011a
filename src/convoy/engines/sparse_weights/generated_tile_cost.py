"""The cost model of `pruned.cuda`, from the mask alone: it orders the tile configurations. No torch here.

It counts the work of a block's code (instructions, bytes that it copies, bytes of itself) and prices it with the constants
below. Its results for ten operators are in docs/kernels/sparse-weights.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from convoy.engines.sparse_weights.codegen.lower_mask import partition, positions
from convoy.engines.sparse_weights.generated_tile import RESERVED_BYTES, VECTORS, GeneratedTile, block_bytes, template
from convoy.problem import ConvProblem, WeightMask
from convoy.target import Target

CLOCKS_US: Final = 1755.0
"""Clocks of a microsecond under load."""

START_CLOCKS: Final = 2100.0
"""A launch in a graph, the latency of the first copy and of the last store: the time of the smallest operators, 1.2 to 2 us."""

BLOCK_CLOCKS: Final = 1200.0
"""The first copy and the last store of a block that is not a multiprocessor's first."""

STEP_CLOCKS: Final = 150.0
"""A barrier, and a jump to other code."""

ISSUE: Final = 1.35
"""Clocks of an instruction, where nothing else binds: registers are read from two banks."""

INSTRUCTION_BYTES: Final = 16

CODE_CLOCKS: Final = 1 / 3
"""Clocks per byte of straight-line code that a multiprocessor fetches, again for each block: operators 7, 9 and 10 in eleven
tile configurations, by clock readings in their code: 2.3 to 3.5 bytes a clock with one, two, four and eight code streams."""

CACHED_CLOCKS: Final = 1 / 6
"""The same where all of a kernel's code is in an instruction cache since the launch before: operators 2 to 6."""

CACHED_BYTES: Final = 128 << 10
"""Of an instruction cache: operator 4, with 125 KB, takes a microsecond less than operator 5 with 260."""

INPUT_CLOCKS: Final = 1 / 28
"""Clocks a byte of input, with all multiprocessors copying: 6.3 TB/s from L2, of operators 9 and 10. It adds up: the warps that
multiply copy too."""

OUTPUT_CLOCKS: Final = 1 / 24
"""The same for the bytes that a multiprocessor stores."""

COMMON_INSTRUCTIONS: Final = 110
"""Of every warp besides multiply-adds and results, once the kernel before has ended: seen in sm_90 code."""


@dataclass(frozen=True, slots=True)
class Counts:
    """The cost of the largest group of filters of a layer.

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
    """The counts of a mask in groups of `filters` filters."""
    nonzero = positions(mask)
    groups = partition(nonzero, filters)
    sizes = nonzero.sum(axis=(1, 2, 3))
    values = [int(sizes[group].sum()) for group in groups]
    largest = nonzero[groups[int(np.argmax(values))]] if values else np.zeros((1, 1, 1, 1), bool)
    used: NDArray[np.bool_] = np.any(largest, axis=0)
    words = tuple(_words(used, vectors) for vectors in VECTORS)
    return Counts(len(groups), max(values, default=0), words, int(np.any(used, axis=(1, 2)).sum()))


def _words(used: NDArray[np.bool_], vectors: int) -> int:
    """Words that hold the used taps of each row, for a thread whose first pixel begins a word: of stride 1."""
    columns = used.shape[-1]
    words = np.zeros((*used.shape[:-1], columns + 2), bool)
    for column in range(columns):
        for word in {column // vectors, (column + vectors - 1) // vectors}:
            words[..., word] |= used[..., column]
    return int(words.sum())


@lru_cache(maxsize=2048)
def estimate_us(problem: ConvProblem, config: GeneratedTile, target: Target) -> float:
    """Estimated microseconds of a tile configuration."""
    assert problem.mask is not None
    counts = counts_of(problem.mask, config.filters)
    layout = template(problem, config)
    blocks = layout.positions // config.tile * counts.groups
    rounds = -(-blocks // target.units)  # blocks of the busiest multiprocessor
    resident = min(_resident(config, target), rounds)
    steps = -(-max(counts.planes, 1) // config.channels)
    words = counts.words[VECTORS.index(config.vectors)]
    own = counts.values * (config.vectors + 0.25) + words
    copied = layout.span * counts.planes * max(len(layout.phases), 1)
    common = COMMON_INSTRUCTIONS + config.filters * config.vectors * (1 if config.splits > 1 else 2.5)
    # Every warp runs its split's part of the multiply-adds, and the common code.
    issue = rounds * config.threads / 128 * (own / config.splits + common) * ISSUE
    # Shared memory gives a warp's word of one float in a clock, of two in two, of four in four; four values in two.
    shared = rounds * config.threads / 32 / config.splits * (words * config.vectors + counts.values * 0.5)
    code = (common + own) * INSTRUCTION_BYTES
    fetch = rounds * code * (CODE_CLOCKS if code * counts.groups > CACHED_BYTES else CACHED_CLOCKS)
    inputs = rounds * copied * 4 * INPUT_CLOCKS
    outputs = problem.n * problem.p * problem.q * problem.k * 4 / min(blocks, target.units) * OUTPUT_CLOCKS
    # Blocks that a multiprocessor has at once copy and multiply at the same time.
    computing = max(issue, shared, fetch)
    clocks = computing + inputs + outputs if resident == 1 else max(computing, inputs + outputs) * 1.2
    begun = START_CLOCKS + (rounds / resident - 1) * BLOCK_CLOCKS + rounds / resident * steps * STEP_CLOCKS
    return (begun + clocks) / CLOCKS_US


def _resident(config: GeneratedTile, target: Target) -> int:
    """Blocks of a tile configuration that a multiprocessor holds at once."""
    by_room = (block_bytes(target) - RESERVED_BYTES) // ((config.shared_kib << 10) + RESERVED_BYTES)
    return max(1, min(by_room, 2048 // config.threads, 65536 // (config.threads * config.registers)))
