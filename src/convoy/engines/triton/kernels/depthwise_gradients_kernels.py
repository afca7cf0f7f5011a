"""Gradients of depthwise convolutions, NHWC: the data gradient gathers, the weight gradient sums parts in one order."""

from __future__ import annotations

import triton
import triton.language as tl

from convoy.engines.triton.kernels.tile_begin import follow, pixel_tile


@triton.jit
def arrange_weight(
    w, arranged,
    c, taps,
    BLOCK_C: tl.constexpr, VECTOR: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """fp32 [taps, c] from [c, taps]: the next kernel reads a tap's channels side by side."""
    follow(WAIT, WAIT)
    c *= VECTOR
    channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    tap = tl.program_id(1)
    weight = tl.load(w + channel * taps + tap, mask=channel < c, other=0.0).to(tl.float32)
    tl.store(arranged + tap * c + channel, weight, mask=channel < c)


@triton.jit
def depthwise_dgrad(
    dy, w, dx,
    pixels, h, width, p, q, c, pad_h, pad_w,
    R: tl.constexpr, S: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    DILATION_H: tl.constexpr, DILATION_W: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, VECTOR: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """One [BLOCK_P pixels, BLOCK_C channels] tile of dx; pixels = n·h·width, w is [R·S, c], c comes as a multiple of VECTOR."""
    follow(WAIT, WAIT)
    c *= VECTOR
    pixel, channel, image, _, row, column, here = pixel_tile(pixels, h, width, c, pad_h, pad_w, BLOCK_P, BLOCK_C)
    acc = tl.zeros((BLOCK_P, BLOCK_C), dtype=tl.float32)
    for r in tl.static_range(R):
        for s in tl.static_range(S):
            from_row = row - r * DILATION_H
            from_column = column - s * DILATION_W
            inside = (from_row >= 0) & (from_row % STRIDE_H == 0) & (from_row // STRIDE_H < p)
            inside &= (from_column >= 0) & (from_column % STRIDE_W == 0) & (from_column // STRIDE_W < q)
            offset = (((image * p + from_row // STRIDE_H) * q + from_column // STRIDE_W) * c)[:, None] + channel[
                None, :
            ]
            gradient = tl.load(dy + offset, mask=inside[:, None] & here, other=0.0).to(tl.float32)
            weight = tl.load(w + (r * S + s) * c + channel, mask=channel < c, other=0.0)
            acc += tl.where(inside[:, None], gradient * weight[None, :], 0.0)
    tl.store(dx + (pixel * c)[:, None] + channel[None, :], acc.to(dx.dtype.element_ty), mask=here)


@triton.jit
def tap_products(
    x, gradient, tap, taps, image, row, column, known, channel,
    h, width, c, S: tl.constexpr, DILATION_H: tl.constexpr, DILATION_W: tl.constexpr,
):  # fmt: skip
    """The gradient times the pixel of x that a tap sees; 0 where it sees none, or there is no such tap."""
    at_row = row + (tap // S) * DILATION_H
    at_column = column + (tap % S) * DILATION_W
    inside = (at_row >= 0) & (at_row < h) & (at_column >= 0) & (at_column < width) & (tap < taps)
    offset = (((image * h + at_row) * width + at_column) * c)[:, None] + channel[None, :]
    seen = inside[:, None] & known
    return tl.where(seen, gradient * tl.load(x + offset, mask=seen, other=0.0).to(tl.float32), 0.0)


@triton.jit
def depthwise_wgrad(
    x, dy, parts,
    pixels, each, h, width, p, q, c, taps, pad_h, pad_w,
    S: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr, DILATION_H: tl.constexpr, DILATION_W: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, VECTOR: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """parts[programs, taps, c]: sums over `each` of the n·p·q pixels of dy a program, for nine taps from 9 · program_id(2) on.

    Sums stay with the threads that load the products, one for each place of the tile, and are added up once, at the end.
    """
    follow(WAIT, WAIT)
    c *= VECTOR
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    first = tl.program_id(2) * 9
    zero = tl.zeros((BLOCK_P, BLOCK_C), dtype=tl.float32)
    sums = (zero, zero, zero, zero, zero, zero, zero, zero, zero)
    begin = tl.program_id(0) * each
    end = tl.minimum(begin + each, pixels)
    for start in range(begin, end, BLOCK_P):
        pixel = start + tl.arange(0, BLOCK_P)
        image = pixel // (p * q)
        place = pixel % (p * q)
        row = (place // q) * STRIDE_H - pad_h
        column = (place % q) * STRIDE_W - pad_w
        known = (pixel < end)[:, None] & (channel < c)[None, :]
        gradient = tl.load(dy + (pixel * c)[:, None] + channel[None, :], mask=known, other=0.0).to(tl.float32)
        more = ()
        for i in tl.static_range(9):
            products = tap_products(
                x, gradient, first + i, taps, image, row, column, known, channel,
                h, width, c, S, DILATION_H, DILATION_W,
            )  # fmt: skip
            more += (sums[i] + products,)
        sums = more
    place = parts + (tl.program_id(0) * taps + first) * c + channel
    known = channel < c
    tl.store(place, tl.sum(sums[0], 0), mask=known)
    for i in tl.static_range(1, 9):
        tl.store(place + i * c, tl.sum(sums[i], 0), mask=known & (first + i < taps))


@triton.jit
def add_parts(
    parts, dw,
    programs, c, taps,
    PARTS: tl.constexpr, BLOCK_C: tl.constexpr, VECTOR: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """dw[c, taps] from parts[programs, taps, c]: one tap, BLOCK_C channels."""
    follow(WAIT, WAIT)
    c *= VECTOR
    channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    tap = tl.program_id(1)
    total = tl.zeros((BLOCK_C,), dtype=tl.float32)
    for start in range(0, programs, PARTS):
        part = start + tl.arange(0, PARTS)
        known = (part < programs)[:, None] & (channel < c)[None, :]
        total += tl.sum(
            tl.load(parts + ((part * taps + tap) * c)[:, None] + channel[None, :], mask=known, other=0.0), 0
        )
    tl.store(dw + channel * taps + tap, total.to(dw.dtype.element_ty), mask=channel < c)
