"""Convolution by swap-AB: out^T[channels, pixels] = W · X^T, both operands loaded by TMA into the shared memory of wgmma."""

from __future__ import annotations

import triton
import triton.language as tl

from convoy.engines.triton.kernels.tile_begin import box_origin, follow
from convoy.engines.triton.kernels.tile_epilogue import activate


@triton.jit
def load_pixels(
    x, n0, p0, q0, tap, c0, channels, pad_h, pad_w, dilation_h, dilation_w,
    S: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_W: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """One tap's [pixels, channels] tile; what lies outside the image comes as zeros.

    Stride 1 reads x[n, h, w, c]. Other strides read the five-dimensional view [n, h / stride_h, stride_h, w / stride_w,
    stride_w * c], in which the pixels that one tap needs are neighbours again.
    """
    row = (tap // S) * dilation_h - pad_h
    column = (tap % S) * dilation_w - pad_w
    if STRIDE_H == 1 and STRIDE_W == 1:
        tile = x.load([n0, p0 + row, q0 + column, c0])
    else:
        # Division rounds toward zero, so it is made on non-negative numbers.
        row += STRIDE_H * pad_h
        column += STRIDE_W * pad_w
        tile = x.load([
            n0,
            p0 + row // STRIDE_H - pad_h,
            row % STRIDE_H,
            q0 + column // STRIDE_W - pad_w,
            (column % STRIDE_W) * channels + c0,
        ])  # fmt: skip
    return tile.reshape(BLOCK_N * BLOCK_H * BLOCK_W, BLOCK_C)


@triton.jit
def prefetch_weights(w_bytes, start, size, share, shares, WARPS: tl.constexpr):
    """Prefetch this block's weights, bytes [start, start + size), into L2; blocks that share weights share the work.

    Weights do not depend on the previous kernel, so this may run before the wait of a dependent launch.
    """
    THREADS: tl.constexpr = 32 * WARPS
    line = tl.arange(0, THREADS) * 128
    for offset in range(share * THREADS * 128, size, shares * THREADS * 128):
        # The last lines ask for one inside again rather than for one beyond the weights.
        address = w_bytes + start + tl.minimum(offset + line, size - 128)
        tl.inline_asm_elementwise(
            "{ prefetch.global.L2 [$1]; mov.u32 $0, 0; }", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def swapped_conv(
    x, w, y, residual, bias, w_bytes,
    tiles_k, tiles_h, tiles_w, c_blocks, iterations, iterations_split, images, channels,
    pad_h, pad_w, dilation_h, dilation_w,
    S: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_C: tl.constexpr, ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr, DTYPE: tl.constexpr, SPLIT: tl.constexpr, WAIT: tl.constexpr, TRIGGER: tl.constexpr,
    PREFETCH_BYTES: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """One [BLOCK_K channels, BLOCK_N x BLOCK_H x BLOCK_W pixels] tile of y, over one share of the taps and channels.

    w is the packed weight [tile, iteration, BLOCK_K, BLOCK_C] as rows: each iteration reads one contiguous block. y is
    the output's descriptor or, with SPLIT, that of the fp32 partial sums [splits x images, p, q, k].
    """
    PIXELS: tl.constexpr = BLOCK_N * BLOCK_H * BLOCK_W
    tile = tl.program_id(0)
    tile_k = tile % tiles_k
    rest = tile // tiles_k
    first = tl.program_id(1) * iterations_split
    last = tl.minimum(first + iterations_split, iterations)
    if PREFETCH_BYTES > 0:
        start = (tile_k * iterations + first) * PREFETCH_BYTES
        size = (last - first) * PREFETCH_BYTES
        prefetch_weights(w_bytes, start, size, rest, tl.num_programs(0) // tiles_k, WARPS)
    follow(WAIT, TRIGGER)
    n0, p0, q0 = box_origin(rest, tiles_h, tiles_w, BLOCK_N, BLOCK_H, BLOCK_W)
    acc = tl.zeros((BLOCK_K, PIXELS), dtype=tl.float32)
    for i in range(first, last):
        tap = i // c_blocks
        c0 = (i - tap * c_blocks) * BLOCK_C
        pixels = load_pixels(
            x, n0, p0, q0, tap, c0, channels, pad_h, pad_w, dilation_h, dilation_w,
            S, STRIDE_H, STRIDE_W, BLOCK_N, BLOCK_H, BLOCK_W, BLOCK_C,
        )  # fmt: skip
        weights = w.load([(tile_k * iterations + i) * BLOCK_K, 0])
        acc = tl.dot(weights, pixels.T, acc, input_precision=PRECISION)
    k0 = tile_k * BLOCK_K
    if SPLIT:
        y.store([tl.program_id(1) * images + n0, p0, q0, k0], acc.T.reshape(BLOCK_N, BLOCK_H, BLOCK_W, BLOCK_K))
    else:
        out = acc.T
        if bias is not None:
            out += tl.load(bias + k0 + tl.arange(0, BLOCK_K))[None, :].to(tl.float32)
        if residual is not None:
            out += residual.load([n0, p0, q0, k0]).reshape(PIXELS, BLOCK_K).to(tl.float32)
        y.store([n0, p0, q0, k0], activate(out, ACTIVATION).to(DTYPE).reshape(BLOCK_N, BLOCK_H, BLOCK_W, BLOCK_K))
