"""Depthwise convolution: every channel by its own filter, on vectors of channels."""

from __future__ import annotations

import triton
import triton.language as tl

from convoy.engines.triton.kernels.tile_begin import follow
from convoy.engines.triton.kernels.tile_epilogue import activate


@triton.jit
def depthwise_conv(
    x, w, y, residual, bias,
    p, q, h, width, c, tiles_c, tiles_w, tiles_h, pad_h, pad_w,
    R: tl.constexpr, S: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr, DILATION_H: tl.constexpr,
    DILATION_W: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_C: tl.constexpr,
    VECTOR: tl.constexpr, ACTIVATION: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """One [BLOCK_H x BLOCK_W pixels, BLOCK_C channels] tile of y; w is fp32 [r·s, c].

    c comes as a multiple of VECTOR, so that the compiler knows how wide it may load.

    Neighbouring taps read the same pixels again: those reads hit the first-level cache.
    """
    follow(WAIT, WAIT)
    c *= VECTOR
    tile = tl.program_id(0)
    channel = (tile % tiles_c) * BLOCK_C + tl.arange(0, BLOCK_C)
    rest = tile // tiles_c
    within = tl.arange(0, BLOCK_H * BLOCK_W)
    column = (rest % tiles_w) * BLOCK_W + within % BLOCK_W
    rest = rest // tiles_w
    row = (rest % tiles_h) * BLOCK_H + within // BLOCK_W
    image = rest // tiles_h
    c_inside = channel < c
    acc = tl.zeros((BLOCK_H * BLOCK_W, BLOCK_C), dtype=tl.float32)
    for r in tl.static_range(R):
        for s in tl.static_range(S):
            rows = row * STRIDE_H - pad_h + r * DILATION_H
            columns = column * STRIDE_W - pad_w + s * DILATION_W
            inside = (rows >= 0) & (rows < h) & (columns >= 0) & (columns < width)
            offset = ((image * h + rows) * width + columns) * c
            values = tl.load(
                x + offset[:, None] + channel[None, :], mask=inside[:, None] & c_inside[None, :], other=0.0
            )
            weights = tl.load(w + (r * S + s) * c + channel, mask=c_inside, other=0.0)
            acc += values.to(tl.float32) * weights[None, :]
    inside = ((row < p) & (column < q))[:, None] & c_inside[None, :]
    offset = (((image * p + row) * q + column) * c)[:, None] + channel[None, :]
    if bias is not None:
        acc += tl.load(bias + channel, mask=c_inside, other=0.0)[None, :].to(tl.float32)
    if residual is not None:
        acc += tl.load(residual + offset, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + offset, activate(acc, ACTIVATION).to(y.dtype.element_ty), mask=inside)
