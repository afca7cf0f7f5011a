"""Which tile configurations of `bottleneck.cu` are worth measuring, by an estimate that no timing has fitted yet.

The rates are those of the single-layer kernels of the same device (`igemm_swap_ab_tile_search`, docs/kernels/hopper.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Final

from convoy.engines.hopper.chains.bottleneck_tile_config import REGISTERS, Bottleneck, BottleneckTile, chunks_of

_FLOPS_NS_PER_SM: Final = 6000.0
_LOAD_BYTES_NS_PER_SM: Final = 95.0
_MEMORY_BYTES_NS: Final = 2900.0
"""Rates of products, of copies from L2 to one multiprocessor while all copy, and of memory."""

_STORE_NS: Final = 0.9
"""Of one row of sums: rounding, activation, and the way to shared memory, for each column of 64 filters."""

_MEETING_NS: Final = 60.0
_CHUNK_NS: Final = 45.0
_OUT_BLOCK_NS: Final = 170.0
_OUT_BLOCK_AHEAD_NS: Final = 90.0
"""A barrier of all multiplying warpgroups; a chunk of weights beside its products; a block of results beside them, where
the next products have not begun yet and where they have."""

_START_NS: Final = 2600.0
"""Launch, the first copies and the last store."""

_MOST: Final = 20


@dataclass(frozen=True, slots=True)
class PassWork:
    """What a block of threads does in one pass.

    Attributes:
        product_ns: products of all multiplying warpgroups, at the tensor cores' rate.
        beside_ns: what a warpgroup does between products.
        consumers: multiplying warpgroups, of which one can multiply while another does that.
        bytes: copied from L2.
    """

    product_ns: float
    beside_ns: float
    consumers: int
    bytes: float

    @property
    def ns(self) -> float:
        """The slower of computing and copying."""
        return max(self.product_ns + self.beside_ns / self.consumers, self.bytes / _LOAD_BYTES_NS_PER_SM)


def first_pass(block: Bottleneck, tile: BottleneckTile) -> PassWork:
    """The pass of the first convolution alone, with which an item begins."""
    parts = block.mid // 64
    chunks = block.c // 64
    products = _product_ns(tile.rows * block.w, block.c, block.mid) * tile.consumers
    weights = 0 if not tile.weight_stages else chunks * tile.chunk_bytes(block) / tile.cluster
    beside = chunks * _CHUNK_NS + parts * tile.rows * block.w * _STORE_NS + 2 * _MEETING_NS
    return PassWork(products, beside, tile.consumers, chunks * tile.stage_bytes(block) + weights)


def whole_pass(block: Bottleneck, tile: BottleneckTile) -> PassWork:
    """A pass of all three convolutions."""
    parts, outs = block.mid // 64, block.k // 64
    begin, own = first_pass(block, tile), tile.rows * block.w
    products = _product_ns(tile.span(block), 9 * block.mid, block.mid) + _product_ns(own, block.mid, block.k)
    weights = 0 if not tile.weight_stages else (9 * parts + outs) * tile.chunk_bytes(block) / tile.cluster
    beside = 9 * parts * _CHUNK_NS + parts * tile.span(block) * _STORE_NS + _MEETING_NS
    beside += outs * ((_OUT_BLOCK_AHEAD_NS if tile.ahead else _OUT_BLOCK_NS) + own * _STORE_NS)
    # The residual is copied if there is one; results leave on the same way
    moved = outs * tile.stage_bytes(block) * (1 + (block.residual != "none"))
    return PassWork(
        begin.product_ns + products * tile.consumers,
        begin.beside_ns + beside,
        tile.consumers,
        begin.bytes + weights + moved,
    )


def estimate_us(block: Bottleneck, tile: BottleneckTile, units: int) -> float:
    """Estimated microseconds of a launch: the busiest block of threads, or the memory traffic."""
    at_once = max(1, units // tile.cluster if tile.cluster <= 2 else units * 10 // (tile.cluster * 11))
    rounds = -(-tile.rounds(block) // at_once)
    begin = 0.0 if tile.weight_stages else block.weight_bytes / tile.cluster / _LOAD_BYTES_NS_PER_SM
    busy = rounds * (first_pass(block, tile).ns + tile.passes * whole_pass(block, tile).ns) + begin
    # Both add to the time where they are of about the same size
    return (math.hypot(busy**2, (block.bytes_min / _MEMORY_BYTES_NS) ** 2) ** 0.5 + _START_NS) / 1000


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
            for passes, cluster, resident, ahead in product(lengths, (1, 2), (True, False), (True, False)):
                start = BottleneckTile(rows, consumers, passes, 2, 0 if resident else 2, cluster, ahead)
                tile = _deepest(block, start)
                if tile is not None:
                    yield tile


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


def _product_ns(columns: int, summed: int, filters: int) -> float:
    """Products of one warpgroup. Below 64 columns the reads of the filters bind (columns/4 + 16 clocks instead of columns/2)."""
    whole = -(-columns // 8) * 8
    return 2.0 * max(whole, whole / 2 + 32) * summed * filters / _FLOPS_NS_PER_SM
