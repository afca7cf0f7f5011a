"""Persistent convolution: thread blocks that stay and take tile after tile, so that a store overlaps the next tile's loads."""

from __future__ import annotations

import triton
import triton.language as tl

from convoy.engines.triton.kernels.igemm_swap_ab_kernel import load_pixels
from convoy.engines.triton.kernels.tile_begin import box_origin, follow
from convoy.engines.triton.kernels.tile_epilogue import activate


@triton.jit
def finish_columns(
    y, residual, bias, part, n0, p0, q0, k0,
    BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_W: tl.constexpr, COLUMNS: tl.constexpr,
    ACTIVATION: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Bias, residual and activation of [pixels, COLUMNS channels], and their store."""
    PIXELS: tl.constexpr = BLOCK_N * BLOCK_H * BLOCK_W
    if bias is not None:
        part += tl.load(bias + k0 + tl.arange(0, COLUMNS))[None, :].to(tl.float32)
    if residual is not None:
        part += residual.load([n0, p0, q0, k0]).reshape(PIXELS, COLUMNS).to(tl.float32)
    y.store([n0, p0, q0, k0], activate(part, ACTIVATION).to(DTYPE).reshape(BLOCK_N, BLOCK_H, BLOCK_W, COLUMNS))


@triton.jit
def halves(out, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The left and the right half of a tile's columns: a warp's own columns are split, no data moves between threads."""
    return tl.split(out.reshape(ROWS, 2, COLUMNS // 2).permute(0, 2, 1))


@triton.jit
def finish_pair(
    y, residual, bias, out, n0, p0, q0, k0,
    BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_W: tl.constexpr, COLUMNS: tl.constexpr,
    ACTIVATION: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """`finish_columns` of [pixels, 2 · COLUMNS channels], one half after the other."""
    left, right = halves(out, BLOCK_N * BLOCK_H * BLOCK_W, 2 * COLUMNS)
    finish_columns(y, residual, bias, left, n0, p0, q0, k0, BLOCK_N, BLOCK_H, BLOCK_W, COLUMNS, ACTIVATION, DTYPE)
    finish_columns(
        y, residual, bias, right, n0, p0, q0, k0 + COLUMNS, BLOCK_N, BLOCK_H, BLOCK_W, COLUMNS, ACTIVATION, DTYPE
    )


@triton.jit
def persistent_conv(
    x, w, y, residual, bias, tiles, tiles_k, tiles_h, tiles_w, c_blocks, iterations, channels,
    pad_h, pad_w, dilation_h, dilation_w,
    S: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_C: tl.constexpr, SWAPPED: tl.constexpr, PARTS: tl.constexpr,
    ACTIVATION: tl.constexpr, PRECISION: tl.constexpr, DTYPE: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """Tiles of [BLOCK_N x BLOCK_H x BLOCK_W pixels, BLOCK_K channels] of y, block after block of them in the order of k.

    Tiles that run at one time share their pixels: those come from memory once, the weights from L2. With SWAPPED the weight is
    the tensor core's first operand, as in `swapped_conv`; without, pixels are (plain rows of pixels only: a box's tile would
    take a detour through registers). The epilogue stores the channels in PARTS parts, so that its tile of shared memory is
    that much smaller. w is the packed weight of `swapped_conv`.
    """
    PIXELS: tl.constexpr = BLOCK_N * BLOCK_H * BLOCK_W
    COLUMNS: tl.constexpr = BLOCK_K // PARTS
    follow(WAIT, WAIT)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        tile_k = tile % tiles_k
        n0, p0, q0 = box_origin(tile // tiles_k, tiles_h, tiles_w, BLOCK_N, BLOCK_H, BLOCK_W)
        if SWAPPED:
            acc = tl.zeros((BLOCK_K, PIXELS), dtype=tl.float32)
        else:
            acc = tl.zeros((PIXELS, BLOCK_K), dtype=tl.float32)
        for i in range(iterations):
            tap = i // c_blocks
            c0 = (i - tap * c_blocks) * BLOCK_C
            weights = w.load([(tile_k * iterations + i) * BLOCK_K, 0])
            if SWAPPED:
                pixels = load_pixels(
                    x, n0, p0, q0, tap, c0, channels, pad_h, pad_w, dilation_h, dilation_w,
                    S, STRIDE_H, STRIDE_W, BLOCK_N, BLOCK_H, BLOCK_W, BLOCK_C,
                )  # fmt: skip
                acc = tl.dot(weights, pixels.T, acc, input_precision=PRECISION)
            else:
                pixels = x.load([q0, c0])
                acc = tl.dot(pixels, weights.T, acc, input_precision=PRECISION)
        out = acc
        if SWAPPED:
            out = acc.T
        k0 = tile_k * BLOCK_K
        if PARTS == 1:
            finish_columns(
                y, residual, bias, out, n0, p0, q0, k0, BLOCK_N, BLOCK_H, BLOCK_W, COLUMNS, ACTIVATION, DTYPE
            )
        elif PARTS == 2:
            finish_pair(y, residual, bias, out, n0, p0, q0, k0, BLOCK_N, BLOCK_H, BLOCK_W, COLUMNS, ACTIVATION, DTYPE)
        else:
            left, right = halves(out, PIXELS, BLOCK_K)
            finish_pair(y, residual, bias, left, n0, p0, q0, k0, BLOCK_N, BLOCK_H, BLOCK_W, COLUMNS, ACTIVATION, DTYPE)
            finish_pair(
                y, residual, bias, right, n0, p0, q0, k0 + 2 * COLUMNS,
                BLOCK_N, BLOCK_H, BLOCK_W, COLUMNS, ACTIVATION, DTYPE,
            )  # fmt: skip
