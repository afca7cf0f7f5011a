"""Which tile configurations of `inverted_residual.cu` are worth measuring, by an estimate that is fitted to times on an H100.

Those of `expand_depthwise.cu` by the same estimate, without the terms of the last layer and with the stores of y.

A block of threads computes products, issues instructions and moves values through shared memory; each is counted for one slice. A
multiprocessor takes a share of their sum for each of its blocks. It also waits for the busiest warp's dependent steps, once for
all blocks that it has at one time. Five constants are fitted; all others are counted, or the device's rates.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import Final, NamedTuple

from convoy.engines.hopper.chains.inverted_residual_block import InvertedResidual
from convoy.engines.hopper.chains.inverted_residual_tile_config import (
    CHANNELS,
    MOST_SUMS,
    STEP,
    InvertedTile,
    TileNeeds,
)

_CLOCKS_US: Final = 1700.0
_PRODUCT_CLOCKS: Final = 1.66
"""Clocks a microsecond; clocks of a multiprocessor for a product of 16 x 8 x 16."""

_LAUNCH_US: Final = 1.11
_BLOCK_CLOCKS: Final = 739.0
"""Of a launch, and of a multiprocessor for each block of threads.

These and the next three are fitted, by least squares of the logarithms, to 264 settings timed on an H100: MobileNetV2's blocks in
fp16 at batch 1 and 32, launched one behind the other. The kernel was an earlier one, without clusters and `expand_n`.
"""

_WORK: Final = 0.522
"""Of the sum of products, instructions and shared memory traffic: two blocks at one time took 1.5 times as long as one."""

_WAIT: Final = 0.511
"""A block waits for this share of the time that its busiest warp would take for all of the block's sum."""

_PREPARED_BYTES_CLOCK: Final = 41.4
"""Bytes of x and of windows in a clock, before the first slice: the borders of windows become zeros.

With a second window, settings took up to 24 % longer at batch 1.
"""

_TURN_CLOCKS: Final = 90.0
"""A turn of the loop over slices, with its barriers. With two windows there is a turn more, and a turn has one barrier, not two.

The times show no gain of that: at batch 1, 44 of 48 settings took longer with a second window.
"""

_CLUSTER_CLOCKS: Final = 1500.0
"""Meetings of a cluster and reads of its sums; not fitted, for no cluster was timed."""

_WEIGHT_BYTES_US: Final = 4.0e6
_MEMORY_BYTES_US: Final = 3.0e6
_COPY_BYTES_CLOCK: Final = 24.0
"""From the L2 cache for all multiprocessors, from memory, and for one block of threads."""

_STORE_CLOCKS: Final = 4.0
"""Of a multiprocessor for a warp's store of 256 bytes of filtered values: 64 bytes a clock; not fitted."""

_MOST_SHARED: Final = 6
"""Blocks of `expand_depthwise.cu` for each multiprocessor, if the slices of a tile are divided among some."""

_ROWS: Final = (1, 2, 3, 4, 5, 7)
_WARPS: Final = 8
"""Rows of a unit, and the most warps, that are looked at."""

_MOST_WASTE: Final = 1.25
"""Rows of all tiles for each row of y."""

_MOST: Final = 16
_ALIKE: Final = 2
"""Configurations that are offered, and of those that differ in slices and windows alone."""


class _Shape(NamedTuple):
    """A tile of a block, whatever its windows, stages and clusters are.

    Attributes:
        needs: of a block of threads.
        work: clocks of a multiprocessor for a slice.
        wait: clocks of its busiest warp for a slice, which no other warp of the block fills.
        slices: of the channels inside.
        blocks: of threads, if each has all slices.
    """

    needs: TileNeeds
    work: float
    wait: float
    slices: int
    blocks: int


def _shape(block: InvertedResidual, tile: InvertedTile) -> _Shape:
    needs, filtered = tile.needs(block), _filter_clocks(block, tile)
    tiles, shares = -(-needs.positions // STEP), (tile.expand_m, tile.expand_n)
    work, wait = _expansion(block, tiles, tile.slice_k // STEP, tile.warps, shares)
    wait += 4 * _WAIT * filtered / tile.warps  # a multiprocessor has four schedulers
    blocks = tile.grid(block) // (tile.cluster * tile.share)
    return _Shape(needs, work + _WORK * filtered, wait, tile.slices(block), blocks)


def _expansion(
    block: InvertedResidual, tiles: int, steps: int, warps: int, shares: tuple[int, int]
) -> tuple[float, float]:
    """Work and wait for a slice's expanded values, in tiles of 16 pixels by 8 channels; shares: `expand_m` and `expand_n`."""
    (pixels, columns), depth = shares, -(-block.c // STEP)
    products = tiles * 2 * steps * depth
    loaded = tiles * depth * (columns + steps / pixels)
    instructions = products + loaded + tiles * 2 * steps * (7 + 2 * _wide(block.activations[0]))
    clocks = products * _PRODUCT_CLOCKS + instructions / 4 + 4 * loaded + tiles * 4 * steps
    busiest = -(-(-(-tiles // pixels) * columns) // warps) * pixels / (columns * tiles)
    return _WORK * clocks, 4 * _WAIT * clocks * busiest


def _filter_clocks(block: InvertedResidual, tile: InvertedTile) -> float:
    """Of a slice's filtered values, and of their part of y, or of their stores to it."""
    steps, taps = tile.slice_k // STEP, block.taps * block.taps
    pairs, seen = tile.warps // tile.warps_k, (tile.rows - 1) * block.stride + block.taps
    filtered, last = 2 * pairs * steps, pairs * steps * -(-tile.block_n // STEP)
    products = filtered * tile.rows * taps / 2 + 2 * last * tile.rows
    loaded = filtered * seen * block.taps / 2 + last
    stored = 0 if block.projects else filtered * tile.rows
    instructions = (
        products
        + loaded
        + 3 * stored
        + filtered * (14 + 1.5 * taps + tile.rows * (6 + 2 * _wide(block.activations[1])))
    )
    return products * _PRODUCT_CLOCKS + instructions / 4 + 4 * loaded + filtered * taps / 2 + _STORE_CLOCKS * stored


def _wide(activation: str) -> float:
    """Instructions for a pair of values: those that begin or end with zero and six take one each.

    SiLU has four of the special function unit, which takes eight times as long for one as the schedulers; counted, not fitted.
    """
    return {"none": 1.0, "relu": 1.0, "relu6": 2.0, "silu": 12.0 + 4 * 8.0}.get(activation, 16.0)


def _busy_us(shape: _Shape, windows: int, divided: tuple[int, int], at_once: int, units: int) -> float:
    """Of the busiest multiprocessor, with `at_once` blocks at one time; or of all for the weights, if that is longer.

    divided: `cluster` and `share`.
    """
    needs, (cluster, share) = shape.needs, divided
    slices, blocks = -(-shape.slices // (cluster * share)), shape.blocks * cluster * share
    usable = units if cluster <= 2 else units * 10 // 11  # clusters leave some multiprocessors empty
    each = -(-blocks // usable)
    prepared = needs.pixel_bytes + windows * needs.window_bytes
    work = slices * shape.work + prepared / _PREPARED_BYTES_CLOCK + _BLOCK_CLOCKS
    wait = slices * shape.wait + (slices + windows - 1) * _TURN_CLOCKS + (_CLUSTER_CLOCKS if cluster > 1 else 0.0)
    wait += (needs.stage_bytes + needs.pixel_bytes) / _COPY_BYTES_CLOCK
    busy = (each * work + -(-each // at_once) * wait) / _CLOCKS_US
    return max(busy, blocks * slices * needs.stage_bytes / _WEIGHT_BYTES_US)


def _total_us(block: InvertedResidual, busy_us: float) -> float:
    """With the launch and the traffic of memory."""
    return _LAUNCH_US + math.hypot(busy_us, block.bytes_min / _MEMORY_BYTES_US)


def estimate_inverted_us(block: InvertedResidual, tile: InvertedTile, units: int, *, hopper: bool = True) -> float:
    """Estimated microseconds of a launch: the busiest multiprocessor, and the traffic of weights and of memory."""
    at_once = tile.blocks_per_sm(block, hopper=hopper)
    return _total_us(block, _busy_us(_shape(block, tile), tile.windows, (tile.cluster, tile.share), at_once, units))


@lru_cache(maxsize=256)
def inverted_tiles(
    block: InvertedResidual, units: int, shared_limit: int, *, hopper: bool = True
) -> tuple[InvertedTile, ...]:
    """Configurations worth measuring, by rising estimate."""
    kept: dict[tuple[int, ...], int] = {}
    chosen: list[InvertedTile] = []
    for _, _, start, windows, (cluster, share) in sorted(_timed(block, units, shared_limit, hopper=hopper)):
        shape = (start.octets, start.rows, start.bands, start.warps_k, start.block_n, cluster, share)
        if kept.get(shape, 0) == _ALIKE:
            continue
        tile = replace(start, windows=windows, stages=windows + 1, cluster=cluster, share=share)
        if not tile.refusal(block, shared_limit):
            kept[shape] = kept.get(shape, 0) + 1
            chosen.append(tile)
        if len(chosen) == _MOST:
            break
    return tuple(chosen)


def _timed(
    block: InvertedResidual, units: int, shared_limit: int, *, hopper: bool
) -> Iterator[tuple[float, int, InvertedTile, int, tuple[int, int]]]:
    """The estimate of each configuration that fits shared memory, its number, and its tile, windows, cluster and share.

    A block has thousands of configurations. What all windows and clusters of a tile share is computed once.
    """
    number = 0
    for tile in _candidates(block):
        shape = _shape(block, tile)
        for windows in (1, 2):
            if (shared := shape.needs.shared_bytes(windows, windows + 1)) > shared_limit:
                continue
            at_once = shape.needs.blocks_per_sm(shared, hopper=hopper)
            for divided in _divisions(block, shape, units, hopper=hopper):
                number += 1
                yield _busy_us(shape, windows, divided, at_once, units), number, tile, windows, divided


def _divisions(block: InvertedResidual, shape: _Shape, units: int, *, hopper: bool) -> list[tuple[int, int]]:
    """`cluster` and `share`: among how many blocks a tile's slices are divided."""
    if not block.projects:
        most, slices = _MOST_SHARED * units // shape.blocks, shape.slices
        shares = sorted({-(-slices // each) for each in range(1, slices + 1)})
        return [(1, share) for share in shares if share == 1 or share <= most]
    clusters = (1, 2, 4, 8) if hopper else (1,)
    return [(cluster, 1) for cluster in clusters if cluster == 1 or cluster * shape.blocks * cluster <= 2 * units]


def _candidates(block: InvertedResidual) -> Iterator[InvertedTile]:
    """Tiles with one window and without clusters."""
    widest = -(-block.q // 8)
    octets = sorted({-(-widest // parts) for parts in range(1, widest + 1)})
    filters, deepest = _columns(block.projected), -(-block.mid // STEP) * STEP
    for across, rows, bands in product(octets, _ROWS, range(1, 17)):
        high, pairs = rows * bands, across * bands // 2
        if across * bands % 2 or pairs > _WARPS or -(-block.p // high) * high > _MOST_WASTE * block.p + 1:
            continue
        tiles = -(-InvertedTile(across, rows, bands, 1, STEP, 1, 2, 1, CHANNELS).positions(block) // STEP)
        for warps_k, slice_k in product((1, 2, 4), (16, 32, 48, 64)):
            if pairs * warps_k > _WARPS or slice_k % (STEP * warps_k) or slice_k > deepest:
                continue
            pixels, columns = _best_shares(block, tiles, slice_k // STEP, pairs * warps_k)
            for block_n in filters:
                if rows * block_n <= 2 * MOST_SUMS:
                    yield InvertedTile(across, rows, bands, warps_k, slice_k, 1, 2, pixels, block_n, columns)


def _columns(filters: int) -> list[int]:
    """Filters of a block of threads: all of them, or half; 0 of none."""
    return sorted({-(-filters // (parts * CHANNELS)) * CHANNELS for parts in (1, 2)}, reverse=True)


def _best_shares(block: InvertedResidual, tiles: int, steps: int, warps: int) -> tuple[int, int]:
    """`expand_m` and `expand_n` with which the expansion works and waits least."""
    ways = ((2, 1), (1, 1), (2, 2)) if steps % 2 == 0 else ((2, 1), (1, 1))
    return min(ways, key=lambda shares: sum(_expansion(block, tiles, steps, warps, shares)))
