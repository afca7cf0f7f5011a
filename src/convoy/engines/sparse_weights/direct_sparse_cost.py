"""The cost model of `pruned.direct`, and the tile configurations to try by it. No torch here.

It counts a block's work (words from shared memory, entries, bytes that it copies and sends) and prices it with the constants
below. Its results for layers are in docs/kernels/sparse-weights.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from typing import Final

import numpy as np
from numpy.typing import NDArray

from convoy.engines.sparse_weights.codegen.lower_mask import positions
from convoy.engines.sparse_weights.direct_sparse_tile import (
    ENTRY_BYTES,
    FLAT,
    FOUR,
    FOURS,
    LANES,
    LEAST_REGISTERS,
    ONE_BY_ONE,
    POSITION_REGISTERS,
    REGISTERS,
    DirectGeometry,
    DirectTile,
)
from convoy.engines.sparse_weights.generated_tile import block_bytes
from convoy.problem import ConvProblem, WeightMask
from convoy.problem.spec import DTYPE_BYTES
from convoy.target import Target

VECTORS: Final = (1, 2, 3, 4, 5, 6, 7, 8, 10, 13)
FILTERS: Final = (1, 2, 4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128)
SLICES: Final = (1, 2, 4, 8)
PARTS: Final = (1, 2, 4)
EACH: Final = (1, 2, 4, 8)

MOST_FORMS: Final = 12
MOST_OUTPUTS: Final = 8
"""Results of a thread that come from other warps and blocks, at most: each is separate code."""

MOST_THREADS: Final = 1024
LEAST_THREADS: Final = 64
ENOUGH_THREADS: Final = 256
"""Threads of a block: with fewer, no warp computes several filters; with more, no warps share a filter."""

CLUSTER_CAPABILITY: Final = 90

CLOCKS_US: Final = 1755.0
"""Clocks of a microsecond under load."""

START_CLOCKS: Final = 1650.0
"""A launch in a graph, loading the lists, and the last store. This constant and the following ones without another source were
fitted to 810 rows of the tuner on an H200, which lie within 8 % of the model (docs/kernels/sparse-weights.md)."""

BLOCK_CLOCKS: Final = 2270.0
"""More for a block that is not a multiprocessor's first."""

WORD_CLOCKS: Final = 1.02
"""Of shared memory for a word for each lane; 1.04 in a probe."""

ENTRY_CLOCKS: Final = 0.84
"""The same for an entry: a load of two, by all lanes from one place, took 2.26 in the probe."""

FOUR_CLOCKS: Final = 26.0
"""Clocks of a warp that has a multiprocessor to itself, for four entries: dependent loads and sums."""

FILTER_CLOCKS: Final = 36.0
"""The same for a filter's beginning and end."""

EXPOSED: Final = 0.72
"""Of that, what other warps do not hide although shared memory is busy."""

COPY_CLOCKS: Final = {ONE_BY_ONE: 0.039, FOURS: 0.033, FLAT: 0.015}
"""A byte of input. FLAT is more than L2 gives all multiprocessors: blocks ask for the same lines at the same time."""

STRIDED: Final = 1.37
"""Times as many where every other float of a line is read."""

OUTPUT_CLOCKS: Final = 0.042
"""A byte of results."""

RESIDUAL_CLOCKS: Final = 0.053
"""A byte that is added to them."""

LIST_CLOCKS: Final = 0.01
"""A byte of entries."""

CLUSTER_CLOCKS: Final = 430.0
"""A meeting of a cluster's blocks."""

SEND_CLOCKS: Final = 0.145
"""Clocks of a byte sent to another block's shared memory: 7 bytes a clock, with all blocks sending."""

PARTS_CLOCKS: Final = 150.0
"""A meeting of a block's warps."""

FOUND: Final = {1: 100, 2: 100, 4: 91, 8: 91}
"""Per cent of a device's multiprocessors that clusters of so many blocks can use: 66 clusters of two on an H200, 30 of four, 15
of eight. The other multiprocessors are in GPCs that are too small."""


@lru_cache(maxsize=64)
def _counts(mask: WeightMask) -> NDArray[np.int64]:
    """Non-zeros by filter and channel."""
    return positions(mask).sum(axis=(2, 3))


@lru_cache(maxsize=64)
def _nonzeros(mask: WeightMask) -> int:
    return int(_counts(mask).sum())


def most_entries(problem: ConvProblem, config: DirectTile) -> int:
    """Entries of the longest list, at most: every filter's last four may be filled up."""
    assert problem.mask is not None
    geometry = DirectGeometry(problem, config)
    counts = np.add.reduceat(_counts(problem.mask), np.arange(0, geometry.group_channels, geometry.channels), axis=1)
    grouped = counts.reshape(problem.groups, geometry.group_filters, -1)
    blocks = np.add.reduceat(grouped, np.arange(0, geometry.group_filters, config.filters), axis=1)
    return int(blocks.max(initial=0)) + (FOUR - 1) * config.filters


@lru_cache(maxsize=256)
def tile_configs(problem: ConvProblem, target: Target) -> tuple[DirectTile, ...]:
    """Tile configurations to try, by rising estimated time: of each number of positions and slices the best that fits."""
    all_ = dict.fromkeys([*_all(problem, target), *_smallest(problem, target)])
    firsts: dict[tuple[int, int], DirectTile] = {}
    for config in sorted(all_, key=lambda config: estimate_us(problem, config, target)):
        key = (config.vectors, config.slices)
        if key in firsts:
            continue
        if _finds_room(problem, config, target):
            firsts[key] = config
        if len(firsts) == MOST_FORMS:
            break
    return tuple(firsts.values())


def fits(problem: ConvProblem, target: Target) -> bool:
    """Whether some tile configuration fits the device: the smallest ones do, or none."""
    return any(_finds_room(problem, config, target) for config in _smallest(problem, target))


def _finds_room(problem: ConvProblem, config: DirectTile, target: Target) -> bool:
    return DirectGeometry(problem, config).shared_bytes_for(most_entries(problem, config)) <= block_bytes(target)


def _slices(problem: ConvProblem, target: Target) -> list[int]:
    """Slices that there may be: clusters are there since capability 9.0, and each slice has channels."""
    most = problem.c // problem.groups if target.capability >= CLUSTER_CAPABILITY else 1
    return [slices for slices in SLICES if slices <= most]


def _smallest(problem: ConvProblem, target: Target) -> Iterator[DirectTile]:
    """One position of a lane, one filter of a slice."""
    for slices in _slices(problem, target):
        yield DirectTile(1, slices, slices, 1, 1)


def _all(problem: ConvProblem, target: Target) -> Iterator[DirectTile]:
    """Every plausible tile configuration, whether it fits or not."""
    group_filters = problem.k // problem.groups
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
        for vectors in shapes:
            config = DirectTile(vectors, filters, slices, parts, each)
            if slices * parts > 1 and config.outputs > MOST_OUTPUTS:
                continue
            if (LEAST_REGISTERS + POSITION_REGISTERS * vectors) * threads <= REGISTERS:
                yield config


def estimate_us(problem: ConvProblem, config: DirectTile, target: Target) -> float:
    """Estimated microseconds of a tile configuration."""
    assert problem.mask is not None
    geometry = DirectGeometry(problem, config)
    nonzeros = _nonzeros(problem.mask) / (problem.groups * geometry.blocks * config.slices)
    entries = nonzeros + min((FOUR - 1) / 2 * config.filters, (FOUR - 1) * nonzeros)
    shared = entries * (WORD_CLOCKS * config.vectors + ENTRY_CLOCKS)
    fours = entries / FOUR / (config.threads // LANES)
    alone = fours * FOUR_CLOCKS + config.each * FILTER_CLOCKS
    block = max(shared + EXPOSED * alone, alone)
    copy = COPY_CLOCKS[geometry.copy]
    if geometry.copy == ONE_BY_ONE and problem.stride_w > 1:
        copy *= STRIDED
    block += 4 * geometry.channels * geometry.phases * geometry.span * copy + ENTRY_BYTES * entries * LIST_CLOCKS
    if config.slices > 1:
        block += CLUSTER_CLOCKS + geometry.sums_bytes * (config.slices - 1) / config.slices * SEND_CLOCKS
    elif config.parts > 1:
        block += PARTS_CLOCKS
    written = DTYPE_BYTES[problem.y_dtype] * problem.y_spec.elements / geometry.grid
    block += written * (OUTPUT_CLOCKS + (RESIDUAL_CLOCKS if problem.epilogue.residual else 0.0))
    rounds = -(
        -geometry.grid // (config.slices * clusters(config.slices, target))
    )  # blocks of the busiest multiprocessor
    return (START_CLOCKS + rounds * block + (rounds - 1) * BLOCK_CLOCKS) / CLOCKS_US


def clusters(slices: int, target: Target) -> int:
    """Clusters of so many blocks that run at one time, one block on each multiprocessor."""
    return max(1, target.units * FOUND[slices] // (100 * slices))
