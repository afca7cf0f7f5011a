"""Pooling at the convolution's sums: in the registers of the tile that made them, or where the parts of a sum are added.

A window that does not overlap its neighbours and whose sides divide the tile's lies in one tile: the tile's box is reduced
along the window's rows and columns before it is stored. Every other window is reduced by a second kernel, which reads the
partial sums (or the convolution's result) and writes only the pooled results.
"""

from __future__ import annotations

import triton
import triton.language as tl

from convoy.engines.triton.kernels.igemm_swap_ab_kernel import load_pixels, prefetch_weights
from convoy.engines.triton.kernels.split_fp32_kernels import split_sum
from convoy.engines.triton.kernels.tile_begin import box_origin, follow
from convoy.engines.triton.kernels.tile_epilogue import activate


@triton.jit
def larger(a, b):
    """The maximum as PyTorch's pooling has it: NaN over every number."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def pool_box(
    values, BLOCK_K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WINDOW_H: tl.constexpr,
    WINDOW_W: tl.constexpr, AVERAGE: tl.constexpr,
):  # fmt: skip
    """[BLOCK_K, ROWS · COLUMNS] pixels of the convolution → [BLOCK_K, as many as there are windows].

    Rows of all images of a box follow each other: a window's rows are neighbours among them.
    """
    windows = values.reshape(BLOCK_K, ROWS // WINDOW_H, WINDOW_H, COLUMNS // WINDOW_W, WINDOW_W)
    if AVERAGE:
        pooled = tl.sum(tl.sum(windows, axis=4), axis=2) * (1.0 / (WINDOW_H * WINDOW_W))
    else:
        pooled = tl.reduce(tl.reduce(windows, 4, larger), 2, larger)
    return pooled.reshape(BLOCK_K, ROWS * COLUMNS // (WINDOW_H * WINDOW_W))


@triton.jit
def finish_pooled(
    sums, y, residual, bias, n0, p0, q0, k0,
    BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_W: tl.constexpr, WINDOW_H: tl.constexpr,
    WINDOW_W: tl.constexpr, AVERAGE: tl.constexpr, ACTIVATION: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Bias, residual, activation and pooling of one tile's sums [BLOCK_K, pixels], and the store of its windows."""
    if bias is not None:
        sums += tl.load(bias + k0 + tl.arange(0, BLOCK_K))[:, None].to(tl.float32)
    if residual is not None:
        sums += residual.load([n0, p0, q0, k0]).reshape(BLOCK_N * BLOCK_H * BLOCK_W, BLOCK_K).T.to(tl.float32)
    sums = activate(sums, ACTIVATION)
    pooled = pool_box(sums, BLOCK_K, BLOCK_N * BLOCK_H, BLOCK_W, WINDOW_H, WINDOW_W, AVERAGE)
    made = pooled.to(DTYPE).T.reshape(BLOCK_N, BLOCK_H // WINDOW_H, BLOCK_W // WINDOW_W, BLOCK_K)
    y.store([n0, p0 // WINDOW_H, q0 // WINDOW_W, k0], made)


@triton.jit
def pooled_swapped(
    x, w, y, residual, bias, w_bytes,
    tiles_k, tiles_h, tiles_w, c_blocks, iterations, iterations_split, images, channels,
    pad_h, pad_w, dilation_h, dilation_w,
    S: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_C: tl.constexpr, ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr, DTYPE: tl.constexpr, WAIT: tl.constexpr, TRIGGER: tl.constexpr,
    PREFETCH_BYTES: tl.constexpr, WARPS: tl.constexpr,
    WINDOW_H: tl.constexpr, WINDOW_W: tl.constexpr, AVERAGE: tl.constexpr,
):  # fmt: skip
    """As `swapped_conv` over the whole reduction; y is the descriptor of the pooled result."""
    tile = tl.program_id(0)
    tile_k = tile % tiles_k
    rest = tile // tiles_k
    if PREFETCH_BYTES > 0:
        start = tile_k * iterations * PREFETCH_BYTES
        prefetch_weights(w_bytes, start, iterations * PREFETCH_BYTES, rest, tl.num_programs(0) // tiles_k, WARPS)
    follow(WAIT, TRIGGER)
    n0, p0, q0 = box_origin(rest, tiles_h, tiles_w, BLOCK_N, BLOCK_H, BLOCK_W)
    acc = tl.zeros((BLOCK_K, BLOCK_N * BLOCK_H * BLOCK_W), dtype=tl.float32)
    for i in range(iterations_split):
        tap = i // c_blocks
        pixels = load_pixels(
            x, n0, p0, q0, tap, (i - tap * c_blocks) * BLOCK_C, channels, pad_h, pad_w, dilation_h, dilation_w,
            S, STRIDE_H, STRIDE_W, BLOCK_N, BLOCK_H, BLOCK_W, BLOCK_C,
        )  # fmt: skip
        weights = w.load([(tile_k * iterations + i) * BLOCK_K, 0])
        acc = tl.dot(weights, pixels.T, acc, input_precision=PRECISION)
    finish_pooled(
        acc, y, residual, bias, n0, p0, q0, tile_k * BLOCK_K,
        BLOCK_K, BLOCK_N, BLOCK_H, BLOCK_W, WINDOW_H, WINDOW_W, AVERAGE, ACTIVATION, DTYPE,
    )  # fmt: skip


@triton.jit
def pooled_persistent(
    x, w, y, residual, bias, tiles, tiles_k, tiles_h, tiles_w, c_blocks, iterations, channels,
    pad_h, pad_w, dilation_h, dilation_w,
    S: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_C: tl.constexpr, ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr, DTYPE: tl.constexpr, WAIT: tl.constexpr,
    WINDOW_H: tl.constexpr, WINDOW_W: tl.constexpr, AVERAGE: tl.constexpr,
):  # fmt: skip
    """As `persistent_conv` with the weight as first operand; y is the descriptor of the pooled result."""
    follow(WAIT, WAIT)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        tile_k = tile % tiles_k
        n0, p0, q0 = box_origin(tile // tiles_k, tiles_h, tiles_w, BLOCK_N, BLOCK_H, BLOCK_W)
        acc = tl.zeros((BLOCK_K, BLOCK_N * BLOCK_H * BLOCK_W), dtype=tl.float32)
        for i in range(iterations):
            tap = i // c_blocks
            weights = w.load([(tile_k * iterations + i) * BLOCK_K, 0])
            pixels = load_pixels(
                x, n0, p0, q0, tap, (i - tap * c_blocks) * BLOCK_C, channels, pad_h, pad_w, dilation_h, dilation_w,
                S, STRIDE_H, STRIDE_W, BLOCK_N, BLOCK_H, BLOCK_W, BLOCK_C,
            )  # fmt: skip
            acc = tl.dot(weights, pixels.T, acc, input_precision=PRECISION)
        finish_pooled(
            acc, y, residual, bias, n0, p0, q0, tile_k * BLOCK_K,
            BLOCK_K, BLOCK_N, BLOCK_H, BLOCK_W, WINDOW_H, WINDOW_W, AVERAGE, ACTIVATION, DTYPE,
        )  # fmt: skip


@triton.jit
def pooled_split(
    x, w, y, residual, bias, x_inverse, w_inverse,
    tiles_k, tiles_h, tiles_w, c_blocks, iterations, iterations_split, images, channels,
    pad_h, pad_w, dilation_h, dilation_w,
    S: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_C: tl.constexpr, ACTIVATION: tl.constexpr,
    BODY_FIRST: tl.constexpr, WAIT: tl.constexpr,
    WINDOW_H: tl.constexpr, WINDOW_W: tl.constexpr, AVERAGE: tl.constexpr,
):  # fmt: skip
    """As `split_conv` over the whole reduction; y is the descriptor of the pooled result."""
    follow(WAIT, WAIT)
    tile = tl.program_id(0)
    tile_k = tile % tiles_k
    n0, p0, q0 = box_origin(tile // tiles_k, tiles_h, tiles_w, BLOCK_N, BLOCK_H, BLOCK_W)
    sums = split_sum(
        x, w, n0, p0, q0, tile_k, 0, iterations_split, tl.load(x_inverse), tiles_k, c_blocks, iterations, images,
        channels, pad_h, pad_w, dilation_h, dilation_w,
        S, STRIDE_H, STRIDE_W, BLOCK_K, BLOCK_N, BLOCK_H, BLOCK_W, BLOCK_C, BODY_FIRST,
    )  # fmt: skip
    k0 = tile_k * BLOCK_K
    sums *= tl.load(w_inverse + k0 + tl.arange(0, BLOCK_K))[:, None]
    finish_pooled(
        sums, y, residual, bias, n0, p0, q0, k0,
        BLOCK_K, BLOCK_N, BLOCK_H, BLOCK_W, WINDOW_H, WINDOW_W, AVERAGE, ACTIVATION, tl.float32,
    )  # fmt: skip


@triton.jit
def reduce_windows(
    parts, y, residual, bias, elements, conv_elements, p, q, k, y_h, y_w,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr, WINDOW_H: tl.constexpr, WINDOW_W: tl.constexpr,
    STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr, PAD_H: tl.constexpr, PAD_W: tl.constexpr, AVERAGE: tl.constexpr,
    COUNT_PAD: tl.constexpr, UNROLLED: tl.constexpr, VECTOR: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """y[pixel, channel] = pool(activation(sum over splits of parts[split, pixel, channel] + bias + residual)), NHWC.

    One thread has VECTOR neighbouring channels, so that loads are wide; k comes divided by VECTOR, `elements` and
    `conv_elements` too. parts is fp32 [splits, n, p, q, k] or, with one split, what the convolution made, in its own dtype. The
    splits are added in ascending order.
    """
    follow(WAIT, False)
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < elements
    lane = tl.arange(0, VECTOR)
    group = index % k
    pixel = index // k
    column = pixel % y_w * STRIDE_W - PAD_W
    row = pixel // y_w % y_h * STRIDE_H - PAD_H
    image = pixel // y_w // y_h
    EMPTY: tl.constexpr = 0.0 if AVERAGE else float("-inf")
    pooled = tl.full((BLOCK, VECTOR), EMPTY, dtype=tl.float32)
    shift = None
    if bias is not None:
        shift = tl.load(bias + group[:, None] * VECTOR + lane[None, :], mask=inside[:, None], other=0.0).to(tl.float32)
    if UNROLLED:
        for position in tl.static_range(WINDOW_H * WINDOW_W):
            pooled = add_position(
                pooled, parts, residual, shift, inside, image, row + position // WINDOW_W, column + position % WINDOW_W,
                group, conv_elements, p, q, k, SPLITS, ACTIVATION, AVERAGE, VECTOR,
            )  # fmt: skip
    else:
        for position in range(WINDOW_H * WINDOW_W):
            pooled = add_position(
                pooled, parts, residual, shift, inside, image, row + position // WINDOW_W, column + position % WINDOW_W,
                group, conv_elements, p, q, k, SPLITS, ACTIVATION, AVERAGE, VECTOR,
            )  # fmt: skip
    if AVERAGE:
        bottom, right = tl.minimum(row + WINDOW_H, p + PAD_H), tl.minimum(column + WINDOW_W, q + PAD_W)
        if COUNT_PAD:
            counted = (bottom - row) * (right - column)
        else:
            height = tl.minimum(bottom, p) - tl.maximum(row, 0)
            counted = height * (tl.minimum(right, q) - tl.maximum(column, 0))
        pooled = pooled / tl.maximum(counted, 1).to(tl.float32)[:, None]
    place = index.to(tl.int64)[:, None] * VECTOR + lane[None, :]
    tl.store(y + place, pooled.to(y.dtype.element_ty), mask=inside[:, None])


@triton.jit
def add_position(
    pooled, parts, residual, shift, inside, image, row, column, group, conv_elements, p, q, k,
    SPLITS: tl.constexpr, ACTIVATION: tl.constexpr, AVERAGE: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """The windows so far with one more of their pixels, where it lies inside of the convolution's result."""
    EMPTY: tl.constexpr = 0.0 if AVERAGE else float("-inf")
    seen = inside & (row >= 0) & (row < p) & (column >= 0) & (column < q)
    unit = ((image * p + row) * q + column).to(tl.int64) * k + group
    place = unit[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    value = tl.load(parts + place, mask=seen[:, None], other=0.0).to(tl.float32)
    for split in tl.static_range(1, SPLITS):
        value += tl.load(parts + split * conv_elements.to(tl.int64) * VECTOR + place, mask=seen[:, None], other=0.0)
    if shift is not None:
        value += shift
    if residual is not None:
        value += tl.load(residual + place, mask=seen[:, None], other=0.0).to(tl.float32)
    value = tl.where(seen[:, None], activate(value, ACTIVATION), EMPTY)
    return pooled + value if AVERAGE else larger(pooled, value)
