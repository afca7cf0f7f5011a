"""Which tile configurations of `bottleneck.cu` are worth measuring, by an estimate that is fitted to times on an H200.

`bench/chains/fit_cost.py` compares it with the measured rows; docs/kernels/chains.md shows how far off it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import Final

from convoy.engines.hopper.chains.bottleneck_tile_config import (
    CHANNELS,
    REGISTERS,
    Bottleneck,
    BottleneckTile,
    chunks_of,
)

_FLOPS_NS_PER_SM: Final = 6000.0
_MEMORY_BYTES_NS: Final = 4200.0
"""Rates of products and of memory, as in the single-layer kernels' models: not fitted here."""

_PIXELS_NS: Final = 420.0
_PIXELS_BYTES_NS: Final = 43.0
_WEIGHTS_NS: Final = 1320.0
"""From the request of a stage until it is there: of pixels, with their bytes, and of weights."""

_CHUNK_NS: Final = 95.0
_OUT_BLOCK_NS: Final = 17.0
_WIDE_AHEAD_NS: Final = 630.0
"""Beside the products of a chunk of weights; of 64 filters of y that are stored before the next products begin; of 64 filters
of `ahead` with 256 channels inside, for which no cause was found (ptxas spills nothing)."""

_MEETING_NS: Final = 400.0
"""A barrier of all multiplying warpgroups, with the rounding and the stores in front of it."""

_BEGIN_BYTES_NS_PER_SM: Final = 60.0
_START_NS: Final = 2700.0
_CLUSTER: Final = 1.015
_LONE: Final = 1.04
"""Copies of weights that are kept; launch, the first copies and the last store; a factor for clusters, whose blocks wait for
each other; a factor for one multiplying warpgroup, whose stores no other's products hide (512-128-512 at
batch 32: 41.7 us against 40.3)."""

_MOST: Final = 20


def _first_ns(block: Bottleneck, tile: BottleneckTile) -> float:
    """The pass of the first convolution alone, with which an item begins."""
    own = _product_ns(tile.rows * block.w, block.mid) * tile.consumers + _CHUNK_NS
    step = _softest(own, _weights_ns(tile, own), (_pixels_ns(block, tile) + own) / tile.x_stages)
    return block.c // CHANNELS * step + 2 * _MEETING_NS


def _whole_ns(block: Bottleneck, tile: BottleneckTile) -> float:
    """A pass of all three convolutions.

    A stage of the residual becomes one of y and is given back one block of 64 filters later: the ring is one stage shallower.
    """
    second = _product_ns(tile.span(block), block.mid) * tile.consumers + _CHUNK_NS
    last = _product_ns(tile.rows * block.w, block.mid) * tile.consumers + (0.0 if tile.ahead else _OUT_BLOCK_NS)
    if tile.ahead and block.mid > 3 * CHANNELS:
        last += _WIDE_AHEAD_NS
    returned = (_pixels_ns(block, tile) + last) / (tile.x_stages - 1)
    steps = 9 * block.mid // CHANNELS * _softest(second, _weights_ns(tile, second))
    steps += block.k // CHANNELS * _softest(last, _weights_ns(tile, last), returned)
    return _first_ns(block, tile) + steps + _MEETING_NS


def _pixels_ns(block: Bottleneck, tile: BottleneckTile) -> float:
    """Until a requested stage of pixels is there."""
    return _PIXELS_NS + tile.stage_bytes(block) / _PIXELS_BYTES_NS


def _weights_ns(tile: BottleneckTile, step: float) -> float:
    """Between two chunks of a ring of weights, each of which is requested again when `step` has ended; 0 for kept weights."""
    return (_WEIGHTS_NS + step) / tile.weight_stages if tile.weight_stages else 0.0


def _softest(*times: float) -> float:
    """The longest of times, and more where others are about as long."""
    return sum(each**4 for each in times) ** 0.25


def estimate_us(block: Bottleneck, tile: BottleneckTile, units: int) -> float:
    """Estimated microseconds of a launch: the busiest block of threads, and the memory traffic."""
    at_once = max(1, units // tile.cluster if tile.cluster <= 2 else units * 10 // (tile.cluster * 11))
    rounds = -(-tile.rounds(block) // at_once)
    begin = 0.0 if tile.weight_stages else block.weight_bytes / _BEGIN_BYTES_NS_PER_SM
    busy = rounds * (_first_ns(block, tile) + tile.passes * _whole_ns(block, tile)) + begin
    busy *= (1.0 if tile.cluster == 1 else _CLUSTER) * (_LONE if tile.consumers == 1 else 1.0)
    return (math.hypot(busy, block.bytes_min / _MEMORY_BYTES_NS) + _START_NS) / 1000


@lru_cache(maxsize=256)
def tiles(block: Bottleneck, units: int) -> tuple[BottleneckTile, ...]:
    """Configurations worth measuring, by rising estimate; at most three for each kind of cut.

    The first one is the default, which has to build: it is not `ahead`, for which ptxas may find no registers.
    """
    found = sorted(
        ((estimate_us(block, tile, units), index, tile) for index, tile in enumerate(_candidates(block))),
        key=lambda entry: entry[:2],
    )
    kept: dict[tuple[int, int, bool, bool], int] = {}
    chosen: list[BottleneckTile] = []
    for _, _, tile in found:
        shape = (tile.rows, tile.consumers, tile.weight_stages > 0, tile.ahead)
        if kept.get(shape, 0) < 3 and len(chosen) < _MOST:
            kept[shape] = kept.get(shape, 0) + 1
            chosen.append(tile)
    default = next((tile for tile in chosen if not tile.ahead), None)
    return tuple(chosen) if default is None else (default, *(tile for tile in chosen if tile != default))


def _candidates(block: Bottleneck) -> Iterator[BottleneckTile]:
    for consumers in REGISTERS:
        for rows in range(1, min(block.h, 32) + 1):
            most = -(-block.h // (rows * consumers))
            lengths = dict.fromkeys(-(-most // parts) for parts in range(1, most + 1))
            for resident, ahead in product((True, False), (True, False)):
                # Neither passes nor clusters change what fits
                start = BottleneckTile(rows, consumers, 1, 2, 0 if resident else 2, 1, ahead)
                if (tile := _deepest(block, start)) is not None:
                    yield from (replace(tile, passes=n, cluster=cluster) for n, cluster in product(lengths, (1, 2)))


def _deepest(block: Bottleneck, tile: BottleneckTile) -> BottleneckTile | None:
    """The tile with the deepest rings that fit: weights up to a third of what is needed at once, then pixels, then weights."""
    if tile.refusal(block):
        return None
    steps: Sequence[tuple[str, int]] = (("weight_stages", 4), ("x_stages", 4), ("weight_stages", 8), ("x_stages", 8))
    for name, most in steps:
        if name == "weight_stages" and not tile.weight_stages:
            continue
        while getattr(tile, name) < min(most, chunks_of(block)):
            deeper = replace(tile, **{name: getattr(tile, name) + 1})
            if deeper.refusal(block):
                break
            tile = deeper
    return tile


def _product_ns(columns: int, filters: int) -> float:
    """Products of one warpgroup over 64 channels.

    Below 64 columns the reads of the filters bind (columns/4 + 16 clocks instead of columns/2).
    """
    whole = -(-columns // 8) * 8
    return 2.0 * max(whole, whole / 2 + 32) * CHANNELS * filters / _FLOPS_NS_PER_SM
