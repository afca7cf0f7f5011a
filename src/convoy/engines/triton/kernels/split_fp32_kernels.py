"""Exact fp32 products on tensor cores: every operand as two fp16 planes, three products a pair, sums of short runs in fp32.

x · s = hi + lo / 2048 with s a power of two that brings the largest |x| into [2^14, 2^15): hi and lo are fp16 and keep 22
bits of the mantissa, and values far below the largest lose at most 2^-50 of it. The weight is split the same way with one s a
channel, once, when it is packed. hi·hi is the main term, hi·lo + lo·hi its correction; lo·lo is below fp32's last place. A
tensor core truncates what it adds (docs/kernels/strict-fp32.md), so its sums stay short: each run of BLOCK_C products is
added to the total by an fp32 addition.
"""

from __future__ import annotations

import triton
import triton.language as tl

from convoy.engines.triton.kernels.igemm_swap_ab_kernel import load_pixels, prefetch_weights
from convoy.engines.triton.kernels.nonzero_marks import mark_tile
from convoy.engines.triton.kernels.tile_begin import box_origin, follow
from convoy.engines.triton.kernels.tile_epilogue import activate


@triton.jit
def absolute_maxima(x, maxima, w_bytes, elements, weight_bytes, BLOCK: tl.constexpr, WAIT: tl.constexpr):
    """maxima[block] = the largest finite |x| of the elements that fall to this block.

    Before that it asks for the weights of the product, two launches ahead, to be brought to L2: memory is idle meanwhile, where x
    comes from the layer before and is in the cache.
    """
    if w_bytes is not None:
        prefetch_weights(w_bytes, 0, weight_bytes, tl.program_id(0), tl.num_programs(0), 4)
    follow(WAIT, WAIT)
    largest = tl.zeros((BLOCK,), dtype=tl.float32)
    step = tl.num_programs(0) * BLOCK
    for start in range(tl.program_id(0) * BLOCK, elements, step):
        index = start + tl.arange(0, BLOCK)
        value = tl.abs(tl.load(x + index, mask=index < elements, other=0.0))
        largest = tl.maximum(largest, tl.where(value < float("inf"), value, 0.0))
    tl.store(maxima + tl.program_id(0), tl.max(largest, axis=0))


@triton.jit
def split_planes(
    x, maxima, inverse, planes, w_bytes, elements, weight_bytes,
    VALID: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """planes[0] = hi, planes[1] = lo of x; inverse[0] = 1 / s. The maxima are VALID, up to a power of two COUNT.

    Where x comes with its maxima, this is the first launch, and asks for the weights of the product.
    """
    if w_bytes is not None:
        prefetch_weights(w_bytes, 0, weight_bytes, tl.program_id(0), tl.num_programs(0), 4)
    follow(WAIT, WAIT)
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < elements
    # Asked for before the maxima are reduced, so that both loads are on their way together.
    value = tl.load(x + index, mask=inside, other=0.0)
    place = tl.arange(0, COUNT)
    largest = tl.max(tl.load(maxima + place, mask=place < VALID, other=0.0), axis=0)
    exponent = largest.to(tl.int32, bitcast=True) >> 23
    # The exponents of s and 1 / s, with fp32's bias: both stay normal numbers.
    scale_exponent = tl.minimum(tl.maximum(268 - exponent, 1), 253)
    scale = (scale_exponent << 23).to(tl.float32, bitcast=True)
    value *= scale
    high = value.to(tl.float16)
    low = (value - high.to(tl.float32)) * 2048.0
    # An infinity or NaN stays in hi alone.
    low = tl.where(tl.abs(value) < 65504.0, low, 0.0)
    tl.store(planes + index, high, mask=inside)
    tl.store(planes + elements.to(tl.int64) + index, low.to(tl.float16), mask=inside)
    tl.store(inverse, ((254 - scale_exponent) << 23).to(tl.float32, bitcast=True), mask=tl.program_id(0) == 0)


@triton.jit
def split_sum(
    x, w, n0, p0, q0, tile_k, first, last, factor, tiles_k, c_blocks, iterations, images, channels,
    pad_h, pad_w, dilation_h, dilation_w,
    S: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_C: tl.constexpr, BODY_FIRST: tl.constexpr,
):  # fmt: skip
    """[BLOCK_K, pixels]: a tile's sum over iterations first to last, times `factor` = 1 / s of x; w's own is not in it."""
    PIXELS: tl.constexpr = BLOCK_N * BLOCK_H * BLOCK_W
    low_rows = tiles_k * iterations * BLOCK_K
    total = tl.zeros((BLOCK_K, PIXELS), dtype=tl.float32)
    correction = tl.zeros((BLOCK_K, PIXELS), dtype=tl.float32)
    for i in range(first, last):
        tap = i // c_blocks
        c0 = (i - tap * c_blocks) * BLOCK_C
        row = (tile_k * iterations + i) * BLOCK_K
        x_high = load_pixels(
            x, n0, p0, q0, tap, c0, channels, pad_h, pad_w, dilation_h, dilation_w,
            S, STRIDE_H, STRIDE_W, BLOCK_N, BLOCK_H, BLOCK_W, BLOCK_C,
        )  # fmt: skip
        x_low = load_pixels(
            x, images + n0, p0, q0, tap, c0, channels, pad_h, pad_w, dilation_h, dilation_w,
            S, STRIDE_H, STRIDE_W, BLOCK_N, BLOCK_H, BLOCK_W, BLOCK_C,
        )  # fmt: skip
        w_high = w.load([row, 0])
        w_low = w.load([low_rows + row, 0])
        # The factor is a power of two: it costs nothing, and it keeps this sum out of the tensor core's accumulator.
        # With four warps the correction runs on while the body is added; with eight ptxas would serialise that (C7515).
        if BODY_FIRST:
            total += tl.dot(w_high, x_high.T) * factor
        correction = tl.dot(w_high, x_low.T, correction)
        correction = tl.dot(w_low, x_high.T, correction)
        if not BODY_FIRST:
            total += tl.dot(w_high, x_high.T) * factor
    return total + correction * (factor * 0.00048828125)


@triton.jit
def split_conv(
    x, w, y, residual, bias, x_inverse, w_inverse,
    tiles_k, tiles_h, tiles_w, c_blocks, iterations, iterations_split, images, channels,
    pad_h, pad_w, dilation_h, dilation_w, marks,
    S: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_C: tl.constexpr, ACTIVATION: tl.constexpr,
    SPLIT: tl.constexpr, BODY_FIRST: tl.constexpr, WAIT: tl.constexpr,
    MARK_P: tl.constexpr, MARK_Q: tl.constexpr, MARK_K: tl.constexpr,
):  # fmt: skip
    """As `swapped_conv`, on planes: x holds [2 x images, ...], w the packed rows of hi and then those of lo.

    Where the sum is whole and there is a place for them, with marks of the result (`kernels/nonzero_marks.py`).
    """
    follow(WAIT, WAIT)
    PIXELS: tl.constexpr = BLOCK_N * BLOCK_H * BLOCK_W
    tile = tl.program_id(0)
    tile_k = tile % tiles_k
    n0, p0, q0 = box_origin(tile // tiles_k, tiles_h, tiles_w, BLOCK_N, BLOCK_H, BLOCK_W)
    first = tl.program_id(1) * iterations_split
    last = tl.minimum(first + iterations_split, iterations)
    out = split_sum(
        x, w, n0, p0, q0, tile_k, first, last, tl.load(x_inverse), tiles_k, c_blocks, iterations, images, channels,
        pad_h, pad_w, dilation_h, dilation_w,
        S, STRIDE_H, STRIDE_W, BLOCK_K, BLOCK_N, BLOCK_H, BLOCK_W, BLOCK_C, BODY_FIRST,
    )  # fmt: skip
    k0 = tile_k * BLOCK_K
    k_index = k0 + tl.arange(0, BLOCK_K)
    out = (out * tl.load(w_inverse + k_index)[:, None]).T
    if SPLIT:
        y.store([tl.program_id(1) * images + n0, p0, q0, k0], out.reshape(BLOCK_N, BLOCK_H, BLOCK_W, BLOCK_K))
    else:
        if bias is not None:
            out += tl.load(bias + k_index)[None, :]
        if residual is not None:
            out += residual.load([n0, p0, q0, k0]).reshape(PIXELS, BLOCK_K)
        out = activate(out, ACTIVATION)
        y.store([n0, p0, q0, k0], out.reshape(BLOCK_N, BLOCK_H, BLOCK_W, BLOCK_K))
        if marks is not None:
            mark_tile(
                out, marks, tiles_h * tiles_w, tile // tiles_k % (tiles_h * tiles_w), n0, p0, q0, k0, images,
                MARK_P, MARK_Q, MARK_K, BLOCK_N, BLOCK_H, BLOCK_W, BLOCK_K,
            )  # fmt: skip
