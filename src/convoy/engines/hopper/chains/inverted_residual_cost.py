"""Which tile configurations of `inverted_residual.cu` are worth measuring, by an estimate. Its constants await a fit to measured times.

A multiprocessor's time is the largest of three: products, instructions, and shared memory traffic, each counted for one block of
threads; a block alone takes as long as its slices' dependent steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Final

from convoy.engines.hopper.chains.inverted_residual_tile_config import (
    CHANNELS,
    MOST_WARPS,
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
_SLICE_CLOCKS: Final = 150.0
_TURN_CLOCKS: Final = 120.0
_STEP_CLOCKS: Final = 260.0
"""Launch; the first copies and the stores of a block; barriers of a slice; latency of a turn of `expand` and of a step of 16
channels of the depthwise filter."""

_OVERLAP: Final = 1.25
"""How much longer than the largest of the three kinds of work."""

_WEIGHT_BYTES_US: Final = 4.0e6
_MEMORY_BYTES_US: Final = 3.0e6
"""From the L2 cache, and from memory."""

_REGISTERS: Final = 96
_MOST_THREADS: Final = 2048
_SM_BYTES: Final = {False: 100 << 10, True: 228 << 10}
"""Registers of a thread besides its sums; threads and shared memory of a multiprocessor, before capability 9.0 (the least of
8.0 to 8.9) and from it."""

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


def _slice_work(block: InvertedResidual, tile: InvertedTile) -> _Work:
    """Of one slice: 16 pixels by 8 channels of the expanded values, of the filtered ones, and of y."""
    steps, depth = tile.slice_k // STEP, -(-block.c // STEP)
    tiles = -(-tile.positions(block) // STEP)
    pairs, taps = tile.warps // tile.warps_k, block.taps * block.taps
    seen = (tile.rows - 1) * block.stride + block.taps
    filtered, last = 2 * pairs * steps, pairs * steps * (-(-tile.block_n // STEP))
    products = tiles * 2 * steps * depth + filtered * tile.rows * taps / 2 + 2 * last * tile.rows
    loaded = tiles * depth * (1 + steps / tile.expand_m) + filtered * seen * block.taps / 2 + last
    wide = 1 + sum(word not in ("relu", "relu6", "none") for word in block.activations) * 8
    instructions = products + loaded + tiles * 2 * steps * (5 + 2 * wide)
    instructions += filtered * (14 + 2 * taps + tile.rows * (4 + 2 * wide))
    shared = 4 * loaded + tiles * 4 * steps + filtered * taps / 2
    return _Work(products * _PRODUCT_CLOCKS, instructions / 4, shared)


def _alone(block: InvertedResidual, tile: InvertedTile) -> float:
    """Clocks of a block of threads whose multiprocessor has no other."""
    turns = tile.expand_turns(block) * (_TURN_CLOCKS + 20 * -(-block.c // STEP))
    steps = tile.slice_k // (STEP * tile.warps_k) * (_STEP_CLOCKS + 24 * tile.rows * (1 + tile.block_n / 32))
    own = turns + steps if tile.windows == 1 else max(turns, steps) + 0.6 * min(turns, steps)
    copies = tile.stage_bytes(block) / 24
    return tile.slices(block) * max(own + _SLICE_CLOCKS * (3 - tile.windows), copies) + _BLOCK_CLOCKS


def blocks_per_sm(block: InvertedResidual, tile: InvertedTile, *, hopper: bool) -> int:
    """Blocks of threads that a multiprocessor has at one time."""
    threads = 32 * tile.warps
    registers = -(-(tile.registers() + _REGISTERS) // 8) * 8 * threads
    shared = _SM_BYTES[hopper] // (tile.shared_bytes(block) + 1024)
    return max(1, min(shared, 65536 // registers, _MOST_THREADS // threads, 32))


def estimate_inverted_us(block: InvertedResidual, tile: InvertedTile, units: int, *, hopper: bool = True) -> float:
    """Estimated microseconds of a launch: rounds of blocks or all blocks' work, and the traffic of weights and of memory."""
    grid, slices = tile.grid(block), tile.slices(block)
    beside = blocks_per_sm(block, tile, hopper=hopper)
    work = slices * _slice_work(block, tile).clocks() * _OVERLAP + tile.positions(block) * row_bytes(block.c) / 100
    each = -(-grid // units)
    rounds = -(-each // beside)
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
        for index, tile in enumerate(_candidates(block))
        if not tile.refusal(block, shared_limit)
    )
    kept: dict[tuple[int, ...], int] = {}
    chosen: list[InvertedTile] = []
    for _, _, tile in found:
        shape = (tile.octets, tile.rows, tile.bands, tile.warps_k, tile.block_n)
        if kept.get(shape, 0) < _ALIKE and len(chosen) < _MOST:
            kept[shape] = kept.get(shape, 0) + 1
            chosen.append(tile)
    return tuple(chosen)


def _candidates(block: InvertedResidual) -> Iterator[InvertedTile]:
    widest = -(-block.q // 8)
    octets = sorted({-(-widest // parts) for parts in range(1, widest + 1)})
    for across, rows, bands, warps_k in product(octets, range(1, 9), range(1, 17), (1, 2, 4)):
        warps = across * bands // 2 * warps_k
        if across * bands % 2 or not 0 < warps <= MOST_WARPS or (rows * (bands - 1) >= block.p and bands > 2):
            continue
        for slice_k, windows, block_n in product((16, 32, 48, 64), (1, 2), _columns(block.k)):
            if slice_k % (STEP * warps_k) or slice_k > -(-block.mid // STEP) * STEP:
                continue
            tile = InvertedTile(across, rows, bands, warps_k, slice_k, windows, windows + 1, 1, block_n)
            tiles = -(-tile.positions(block) // STEP)
            yield replace(tile, expand_m=2) if tiles >= 2 * warps else tile


def _columns(filters: int) -> list[int]:
    """Filters of a block of threads: all of them, or half."""
    return sorted({-(-filters // (parts * CHANNELS)) * CHANNELS for parts in (1, 2)}, reverse=True)
