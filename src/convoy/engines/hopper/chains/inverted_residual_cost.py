"""Which tile configurations of `inverted_residual.cu` are worth measuring, by an estimate that no measured time was fitted to.

A multiprocessor's time is the largest of three: products, instructions, and shared memory traffic, each counted for one block of
threads; a block alone takes as long as its slices' dependent steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Final

from convoy.engines.hopper.chains.inverted_residual_tile_config import (
    CHANNELS,
    MOST_SUMS,
    STEP,
    InvertedResidual,
    InvertedTile,
    row_bytes,
)

_CLOCKS_US: Final = 1700.0
_PRODUCT_CLOCKS: Final = 1.66
"""Clocks a microsecond; clocks of a multiprocessor for a product of 16 x 8 x 16."""

_LAUNCH_US: Final = 2.6
_BLOCK_CLOCKS: Final = 1500.0
_BARRIER_CLOCKS: Final = 60.0
_LATENCY_CLOCKS: Final = 33.0
_CLUSTER_CLOCKS: Final = 1500.0
"""Launch; the first copies and the stores of a block of threads; a barrier; a product or a load that the next one waits for;
meetings of a cluster and reads of its sums."""

_OVERLAP: Final = 1.25
"""How much longer than the largest of the three kinds of work."""

_WEIGHT_BYTES_US: Final = 4.0e6
_MEMORY_BYTES_US: Final = 3.0e6
_COPY_BYTES_CLOCK: Final = 24.0
"""From the L2 cache for all multiprocessors, from memory, and for one block of threads."""

_ROWS: Final = (1, 2, 3, 4, 5, 7)
_WARPS: Final = 8
"""Rows of a unit, and the most warps, that are looked at."""

_MOST_WASTE: Final = 1.25
"""Rows of all tiles for each row of y."""

_MOST: Final = 16
_ALIKE: Final = 2
"""Configurations that are offered, and of those that differ in slices and windows alone."""


@dataclass(frozen=True, slots=True)
class _Work:
    """Clocks of a multiprocessor for one block of threads."""

    products: float
    instructions: float
    shared: float

    def clocks(self) -> float:
        """The longest, and more where others are about as long."""
        return sum(each**4 for each in (self.products, self.instructions, self.shared)) ** 0.25


def _expand_work(block: InvertedResidual, tile: InvertedTile) -> _Work:
    """Of a slice's expanded values, in tiles of 16 pixels by 8 channels."""
    steps, depth = tile.slice_k // STEP, -(-block.c // STEP)
    tiles = -(-tile.positions(block) // STEP)
    products = tiles * 2 * steps * depth
    loaded = tiles * depth * (tile.expand_n + steps / tile.expand_m)
    instructions = products + loaded + tiles * 2 * steps * (7 + 2 * _wide(block.activations[0]))
    return _Work(products * _PRODUCT_CLOCKS, instructions / 4, 4 * loaded + tiles * 4 * steps)


def _filter_work(block: InvertedResidual, tile: InvertedTile) -> _Work:
    """Of a slice's filtered values, and of their part of y."""
    steps, taps = tile.slice_k // STEP, block.taps * block.taps
    pairs, seen = tile.warps // tile.warps_k, (tile.rows - 1) * block.stride + block.taps
    filtered, last = 2 * pairs * steps, pairs * steps * -(-tile.block_n // STEP)
    products = filtered * tile.rows * taps / 2 + 2 * last * tile.rows
    loaded = filtered * seen * block.taps / 2 + last
    instructions = products + loaded + filtered * (14 + 1.5 * taps + tile.rows * (6 + 2 * _wide(block.activations[1])))
    return _Work(products * _PRODUCT_CLOCKS, instructions / 4, 4 * loaded + filtered * taps / 2)


def _wide(activation: str) -> float:
    """Instructions for a pair of values: those that begin or end with zero and six take one each."""
    return {"none": 1.0, "relu": 1.0, "relu6": 2.0}.get(activation, 16.0)


def _alone(block: InvertedResidual, tile: InvertedTile) -> float:
    """Clocks of a block that has a multiprocessor alone: its work on the scheduler with most warps, and latencies."""
    share = 4 * -(-tile.warps // 4) / tile.warps
    depth = -(-block.c // STEP)
    turns = tile.expand_turns(block) * (3 + depth) * _LATENCY_CLOCKS
    steps = tile.slice_k // (STEP * tile.warps_k) * (6 + block.taps * block.taps / 4) * _LATENCY_CLOCKS
    turns += _expand_work(block, tile).clocks() * share
    steps += _filter_work(block, tile).clocks() * share
    own = turns + steps + 2 * _BARRIER_CLOCKS
    if tile.windows == 2:  # warps that have expanded their tiles go on
        own = turns + steps - 0.25 * min(turns, steps) + _BARRIER_CLOCKS
    copies = tile.stage_bytes(block) / _COPY_BYTES_CLOCK
    return tile.own_slices(block) * max(own, copies) + _BLOCK_CLOCKS + (_CLUSTER_CLOCKS if tile.cluster > 1 else 0.0)


def estimate_inverted_us(block: InvertedResidual, tile: InvertedTile, units: int, *, hopper: bool = True) -> float:
    """Estimated microseconds of a launch: rounds of blocks or all blocks' work, and the traffic of weights and of memory."""
    grid, slices = tile.grid(block), tile.own_slices(block)
    work = slices * (_expand_work(block, tile).clocks() + _filter_work(block, tile).clocks()) * _OVERLAP
    work += tile.positions(block) * row_bytes(block.c) / 100
    usable = units if tile.cluster <= 2 else units * 10 // 11  # clusters leave some multiprocessors empty
    each = -(-grid // usable)
    rounds = -(-each // tile.blocks_per_sm(block, hopper=hopper))
    busy = max(rounds * _alone(block, tile), each * work) / _CLOCKS_US
    weights = grid * slices * tile.stage_bytes(block) / _WEIGHT_BYTES_US
    return _LAUNCH_US + math.hypot(max(busy, weights), block.bytes_min / _MEMORY_BYTES_US)


@lru_cache(maxsize=256)
def inverted_tiles(
    block: InvertedResidual, units: int, shared_limit: int, *, hopper: bool = True
) -> tuple[InvertedTile, ...]:
    """Configurations worth measuring, by rising estimate."""
    found = sorted(
        (estimate_inverted_us(block, tile, units, hopper=hopper), index, tile)
        for index, tile in enumerate(_candidates(block, units, (1, 2, 4, 8) if hopper else (1,)))
        if not tile.refusal(block, shared_limit)
    )
    kept: dict[tuple[int, ...], int] = {}
    chosen: list[InvertedTile] = []
    for _, _, tile in found:
        shape = (tile.octets, tile.rows, tile.bands, tile.warps_k, tile.block_n, tile.cluster)
        if kept.get(shape, 0) < _ALIKE and len(chosen) < _MOST:
            kept[shape] = kept.get(shape, 0) + 1
            chosen.append(tile)
    return tuple(chosen)


def _candidates(block: InvertedResidual, units: int, clusters: Sequence[int]) -> Iterator[InvertedTile]:
    widest = -(-block.q // 8)
    octets = sorted({-(-widest // parts) for parts in range(1, widest + 1)})
    for across, rows, bands in product(octets, _ROWS, range(1, 17)):
        high = rows * bands
        if across * bands % 2 or across * bands > 2 * _WARPS or -(-block.p // high) * high > _MOST_WASTE * block.p + 1:
            continue
        for warps_k, slice_k, block_n in product((1, 2, 4), (16, 32, 48, 64), _columns(block.k)):
            right = across * bands // 2 * warps_k <= _WARPS and slice_k % (STEP * warps_k) == 0
            if not right or rows * block_n > 2 * MOST_SUMS or slice_k > -(-block.mid // STEP) * STEP:
                continue
            tile = InvertedTile(across, rows, bands, warps_k, slice_k, 1, 2, 1, block_n)
            tile = min(_expanding(tile), key=lambda one: (_longest(block, one), -one.expand_m, one.expand_n))
            for windows, cluster in product((1, 2), clusters):
                if cluster == 1 or cluster * tile.grid(block) <= 2 * units:
                    yield replace(tile, windows=windows, stages=windows + 1, cluster=cluster)


def _columns(filters: int) -> list[int]:
    """Filters of a block of threads: all of them, or half."""
    return sorted({-(-filters // (parts * CHANNELS)) * CHANNELS for parts in (1, 2)}, reverse=True)


def _expanding(tile: InvertedTile) -> list[InvertedTile]:
    """Ways to share the expansion among the warps."""
    shares = ((2, 1), (1, 1), (2, 2)) if tile.slice_k % (2 * STEP) == 0 else ((2, 1), (1, 1))
    return [replace(tile, expand_m=pixels, expand_n=columns) for pixels, columns in shares]


def _longest(block: InvertedResidual, tile: InvertedTile) -> float:
    """Tiles of 16 pixels and all channels of a slice that the busiest warp expands."""
    return tile.expand_turns(block) * tile.expand_m / tile.expand_n
