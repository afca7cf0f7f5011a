"""Parallel 1x1 convolutions as one product: a tile's filters belong to one of them, and so does its store."""

from __future__ import annotations

import triton
import triton.language as tl

from convoy.engines.triton.kernels.tile_begin import follow
from convoy.engines.triton.kernels.tile_epilogue import activate


@triton.jit
def merged_conv(
    x, w, y0, y1, y2, y3, bias, tiles_k, end0, end1, end2, iterations,
    BLOCK_K: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, ACTIVATION: tl.constexpr,
    DTYPE: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """One [BLOCK_P pixels, BLOCK_K channels] tile of one of up to four results.

    x is [pixels, c]; w the packed weights of all convolutions, each padded to whole tiles, as rows of BLOCK_C in the order of
    the iterations. Tiles below end0 are y0's, those below end1 y1's, and so on; a result that is not there is None.
    """
    follow(WAIT, WAIT)
    tile_k = tl.program_id(0) % tiles_k
    p0 = (tl.program_id(0) // tiles_k) * BLOCK_P
    acc = tl.zeros((BLOCK_K, BLOCK_P), dtype=tl.float32)
    for i in range(iterations):
        pixels = x.load([p0, i * BLOCK_C])
        weights = w.load([(tile_k * iterations + i) * BLOCK_K, 0])
        acc = tl.dot(weights, pixels.T, acc)
    out = acc.T
    if bias is not None:
        out += tl.load(bias + tile_k * BLOCK_K + tl.arange(0, BLOCK_K))[None, :].to(tl.float32)
    result = activate(out, ACTIVATION).to(DTYPE)
    if tile_k < end0:
        y0.store([p0, tile_k * BLOCK_K], result)
    elif tile_k < end1:
        y1.store([p0, (tile_k - end0) * BLOCK_K], result)
    elif tile_k < end2:
        if y2 is not None:
            y2.store([p0, (tile_k - end1) * BLOCK_K], result)
    elif y3 is not None:
        y3.store([p0, (tile_k - end2) * BLOCK_K], result)
