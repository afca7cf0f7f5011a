"""Backward passes of poolings: every pixel gathers the gradients of the windows that named it, or that it lies in."""

from __future__ import annotations

import triton
import triton.language as tl

from convoy.engines.triton.kernels.tile_begin import follow, pixel_tile


@triton.jit
def window_of(
    row, column, r, s, p, q,
    R: tl.constexpr, S: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
):  # fmt: skip
    """The r-th and s-th last window that may hold a place of the padded image: its row, its column, and whether it does."""
    window_row = row // STRIDE_H - r
    window_column = column // STRIDE_W - s
    inside = (window_row >= 0) & (window_row < p) & (row - window_row * STRIDE_H < R)
    inside &= (window_column >= 0) & (window_column < q) & (column - window_column * STRIDE_W < S)
    return window_row, window_column, inside


@triton.jit
def max_pool_backward(
    dy, indices, dx,
    pixels, h, width, p, q, c, pad_h, pad_w,
    R: tl.constexpr, S: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, VECTOR: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """One [BLOCK_P pixels, BLOCK_C channels] tile of dx, NHWC; pixels = n·h·width, c comes as a multiple of VECTOR.

    A pixel lies in at most ceil(R / STRIDE_H) · ceil(S / STRIDE_W) windows. Neighbouring pixels read the same windows: those
    reads hit the first-level cache. No atomic operation, no zeroing, the same bits every time.
    """
    follow(WAIT, WAIT)
    c *= VECTOR
    pixel, channel, image, place, row, column, here = pixel_tile(pixels, h, width, c, pad_h, pad_w, BLOCK_P, BLOCK_C)
    acc = tl.zeros((BLOCK_P, BLOCK_C), dtype=tl.float32)
    for r in tl.static_range((R + STRIDE_H - 1) // STRIDE_H):
        for s in tl.static_range((S + STRIDE_W - 1) // STRIDE_W):
            window_row, window_column, inside = window_of(row, column, r, s, p, q, R, S, STRIDE_H, STRIDE_W)
            offset = (((image * p + window_row) * q + window_column) * c)[:, None] + channel[None, :]
            known = inside[:, None] & here
            named = tl.load(indices + offset, mask=known, other=-1).to(tl.int32)
            gradient = tl.load(dy + offset, mask=known, other=0.0).to(tl.float32)
            acc += tl.where(named == place[:, None], gradient, 0.0)
    tl.store(dx + (pixel * c)[:, None] + channel[None, :], acc.to(dx.dtype.element_ty), mask=here)


@triton.jit
def avg_pool_backward(
    dy, dx,
    pixels, h, width, p, q, c, pad_h, pad_w, share,
    R: tl.constexpr, S: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    EVEN: tl.constexpr, PADS: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, VECTOR: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """One [BLOCK_P pixels, BLOCK_C channels] tile of dx of an average pooling, laid out as in `max_pool_backward`.

    EVEN: each window divides by as much, and `share` is one over that. Else a window divides by its pixels, those of the padding
    among them where PADS: as many as it has in the padded image, for the last windows may stand out.
    """
    follow(WAIT, WAIT)
    c *= VECTOR
    pixel, channel, image, _, row, column, here = pixel_tile(pixels, h, width, c, pad_h, pad_w, BLOCK_P, BLOCK_C)
    acc = tl.zeros((BLOCK_P, BLOCK_C), dtype=tl.float32)
    for r in tl.static_range((R + STRIDE_H - 1) // STRIDE_H):
        for s in tl.static_range((S + STRIDE_W - 1) // STRIDE_W):
            window_row, window_column, inside = window_of(row, column, r, s, p, q, R, S, STRIDE_H, STRIDE_W)
            offset = (((image * p + window_row) * q + window_column) * c)[:, None] + channel[None, :]
            gradient = tl.load(dy + offset, mask=inside[:, None] & here, other=0.0).to(tl.float32)
            if not EVEN:
                top = window_row * STRIDE_H
                left = window_column * STRIDE_W
                if PADS:
                    rows = tl.minimum(top + R, h + 2 * pad_h) - top
                    columns = tl.minimum(left + S, width + 2 * pad_w) - left
                else:
                    rows = tl.minimum(top + R, h + pad_h) - tl.maximum(top, pad_h)
                    columns = tl.minimum(left + S, width + pad_w) - tl.maximum(left, pad_w)
                gradient *= tl.where(inside, 1.0 / (rows * columns).to(tl.float32), 0.0)[:, None]
            acc += gradient
    if EVEN:
        acc *= share
    tl.store(dx + (pixel * c)[:, None] + channel[None, :], acc.to(dx.dtype.element_ty), mask=here)
