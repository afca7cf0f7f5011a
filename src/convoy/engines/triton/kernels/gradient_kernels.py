"""Gradients of a convolution: dgrad by parities of the stride, wgrad as one product over pixels, summed in a fixed order."""

from __future__ import annotations

import triton
import triton.language as tl

from convoy.engines.triton.kernels.igemm_swap_ab_kernel import load_pixels
from convoy.engines.triton.kernels.tile_begin import box_origin, follow


@triton.jit
def dgrad_conv(
    dy, w, dx, n, h, width, c, k, rows, columns, tiles_c, tiles_h, tiles_w, k_blocks, filter_h, filter_w, pad_h, pad_w,
    dilation_h, dilation_w,
    STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_K: tl.constexpr, K_MAJOR: tl.constexpr,
    VECTOR: tl.constexpr, PRECISION: tl.constexpr, DTYPE: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """One [BLOCK_N x BLOCK_H x BLOCK_W pixels, BLOCK_C channels] tile of the pixels of dx that have one parity.

    A pixel (row, column) of dx has parity (row mod STRIDE_H, column mod STRIDE_W). Pixels of one parity see every STRIDE-th
    tap, and neighbours among them see neighbours in dy: for each parity it is a convolution of stride 1 over dy with some of
    the taps; with none, dx is zero there. dy is [n, p, q, k]; w is the weight as it lies, a matrix [k, r·s·c], or with K_MAJOR
    [c, r·s·k]: two sizes, because a tile of more takes a detour through registers. Its box may reach into the next tap:
    those are channels that are not stored; with K_MAJOR, BLOCK_K divides k. `rows` and `columns` are those of the largest
    parity. dx is written through plain stores, because a descriptor's box could not skip the other parities' pixels; c comes
    as a multiple of VECTOR, so that the compiler knows how wide they may be.
    """
    PIXELS: tl.constexpr = BLOCK_N * BLOCK_H * BLOCK_W
    c *= VECTOR
    follow(WAIT, WAIT)
    tile = tl.program_id(0)
    c0 = (tile % tiles_c) * BLOCK_C
    n0, h0, w0 = box_origin(tile // tiles_c, tiles_h, tiles_w, BLOCK_N, BLOCK_H, BLOCK_W)
    parity_h = tl.program_id(1) // STRIDE_W
    parity_w = tl.program_id(1) % STRIDE_W
    # Taps first, first + stride, ...; a tap's row of dy is the tile's own plus (parity + pad - tap) / stride.
    first_h = (parity_h + pad_h) % STRIDE_H
    first_w = (parity_w + pad_w) % STRIDE_W
    taps_h = tl.maximum(filter_h - first_h + STRIDE_H - 1, 0) // STRIDE_H
    taps_w = tl.maximum(filter_w - first_w + STRIDE_W - 1, 0) // STRIDE_W
    shift_h = (parity_h + pad_h) // STRIDE_H
    shift_w = (parity_w + pad_w) // STRIDE_W
    acc = tl.zeros((BLOCK_C, PIXELS), dtype=tl.float32)
    for i in range(taps_h * taps_w * k_blocks):
        tap = i // k_blocks
        k0 = (i - tap * k_blocks) * BLOCK_K
        tap_h = tap // taps_w
        tap_w = tap - tap_h * taps_w
        pixels = dy.load([n0, h0 + shift_h - tap_h * dilation_h, w0 + shift_w - tap_w * dilation_w, k0])
        index = (first_h + tap_h * STRIDE_H) * filter_w + first_w + tap_w * STRIDE_W
        if K_MAJOR:
            weights = w.load([c0, index * k + k0])
        else:
            weights = w.load([k0, index * c + c0]).T
        acc = tl.dot(weights, pixels.reshape(PIXELS, BLOCK_K).T, acc, input_precision=PRECISION)
    within = tl.arange(0, PIXELS)
    image = n0 + within // (BLOCK_H * BLOCK_W)
    row = (h0 + within // BLOCK_W % BLOCK_H) * STRIDE_H + parity_h
    column = (w0 + within % BLOCK_W) * STRIDE_W + parity_w
    channel = c0 + tl.arange(0, BLOCK_C)
    # A row or column of the box beyond the largest parity's may be one of a row further on: it is the other tile's.
    inside = (image < n) & (row < h) & (column < width)
    inside &= (h0 + within // BLOCK_W % BLOCK_H < rows) & (w0 + within % BLOCK_W < columns)
    offset = ((image * h + row) * width + column) * c
    tl.store(dx + offset[:, None] + channel[None, :], acc.T.to(DTYPE), mask=inside[:, None] & (channel < c)[None, :])


@triton.jit
def wgrad_conv(
    x, dy, out, tiles_c, image_blocks, tiles_h, tiles_w, blocks, blocks_split, taps, c, k, channels,
    pad_h, pad_w, dilation_h, dilation_w,
    S: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_C: tl.constexpr, IMAGES: tl.constexpr,
    PRECISION: tl.constexpr, DTYPE: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """One tap's [BLOCK_K, BLOCK_C] tile of the weight's gradient, summed over one share of the pixels.

    An iteration takes some output pixels: dy's tile is [pixels, k], x's the same pixels shifted by the tap. What lies
    outside comes as zeros. With IMAGES they are one pixel of BLOCK_N images, and x is [h, w, n, c], dy [p, q, n, k]: any
    stride is then a matter of coordinates, and both tiles reach the tensor core from shared memory (a box of more than one
    side would take dy's tile through registers). Without, they are a box of x[n, h, w, c] or of its strided view
    (`load_pixels`). out is [splits, k, taps, c], dense: fp32 shares that `reduce_splits` adds in order, or the gradient.
    """
    PIXELS: tl.constexpr = BLOCK_N * BLOCK_H * BLOCK_W
    follow(WAIT, WAIT)
    tile = tl.program_id(0)
    tap = tile % taps
    rest = tile // taps
    c0 = (rest % tiles_c) * BLOCK_C
    k0 = (rest // tiles_c) * BLOCK_K
    first = tl.program_id(1) * blocks_split
    last = tl.minimum(first + blocks_split, blocks)
    acc = tl.zeros((BLOCK_K, BLOCK_C), dtype=tl.float32)
    for i in range(first, last):
        if IMAGES:
            n0 = (i % image_blocks) * BLOCK_N
            place = i // image_blocks
            p0 = place // tiles_w
            q0 = place - p0 * tiles_w
            row = p0 * STRIDE_H + (tap // S) * dilation_h - pad_h
            column = q0 * STRIDE_W + (tap % S) * dilation_w - pad_w
            pixels = x.load([row, column, n0, c0]).reshape(PIXELS, BLOCK_C)
            gradients = dy.load([p0, q0, n0, k0]).reshape(PIXELS, BLOCK_K)
        else:
            n0, p0, q0 = box_origin(i, tiles_h, tiles_w, BLOCK_N, BLOCK_H, BLOCK_W)
            pixels = load_pixels(
                x, n0, p0, q0, tap, c0, channels, pad_h, pad_w, dilation_h, dilation_w,
                S, STRIDE_H, STRIDE_W, BLOCK_N, BLOCK_H, BLOCK_W, BLOCK_C,
            )  # fmt: skip
            gradients = dy.load([n0, p0, q0, k0]).reshape(PIXELS, BLOCK_K)
        acc = tl.dot(gradients.T, pixels, acc, input_precision=PRECISION)
    channel_k = k0 + tl.arange(0, BLOCK_K)
    channel_c = c0 + tl.arange(0, BLOCK_C)
    offset = (channel_k * taps + tap)[:, None] * c + channel_c[None, :]
    inside = (channel_k < k)[:, None] & (channel_c < c)[None, :]
    tl.store(out + tl.program_id(1) * (k.to(tl.int64) * taps * c) + offset, acc.to(DTYPE), mask=inside)
