"""Convolution by gathered loads: the implicit GEMM for every stride, padding, dilation and number of groups."""

from __future__ import annotations

import triton
import triton.language as tl

from convoy.engines.triton.kernels.tile_begin import follow
from convoy.engines.triton.kernels.tile_epilogue import activate


@triton.jit
def finish_gathered(
    y, residual, bias, out, pixel, channel, pixel_inside, k_inside, pixels, k, pitch,
    ACTIVATION: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Store [pixels, channels] sums: bare partial sums, or sums with bias, residual and activation."""
    inside = pixel_inside[:, None] & k_inside[None, :]
    offset = pixel[:, None] * k + channel[None, :]  # of dense tensors: the partial sums and the residual
    if SPLIT:
        tl.store(y + tl.program_id(1) * (pixels.to(tl.int64) * k) + offset, out, mask=inside)
    else:
        if bias is not None:
            out += tl.load(bias + channel, mask=k_inside, other=0.0)[None, :].to(tl.float32)
        if residual is not None:
            out += tl.load(residual + offset, mask=inside, other=0.0).to(tl.float32)
        place = pixel[:, None] * pitch + channel[None, :]
        tl.store(y + place, activate(out, ACTIVATION).to(y.dtype.element_ty), mask=inside)


@triton.jit
def gathered(
    i, row, column, image, pixel_inside, h, width, c, c_group, c_blocks, dilation_h, dilation_w,
    R: tl.constexpr, S: tl.constexpr, BLOCK_C: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    """One step of the reduction: where its [pixels, BLOCK_C] values lie and which there are, and the same of its weights."""
    if FLAT:
        index = i * BLOCK_C + tl.arange(0, BLOCK_C)
        tap = index // c_group
        channel = index - tap * c_group
        c_inside = index < R * S * c_group
        rows = row[:, None] + (tap // S * dilation_h)[None, :]
        columns = column[:, None] + (tap % S * dilation_w)[None, :]
        inside = pixel_inside[:, None] & c_inside[None, :]
        inside &= (rows >= 0) & (rows < h) & (columns >= 0) & (columns < width)
        offset = ((image[:, None] * h + rows) * width + columns) * c + channel[None, :]
    else:
        tap = i // c_blocks
        channel = (i - tap * c_blocks) * BLOCK_C + tl.arange(0, BLOCK_C)
        index = tap * c_group + channel
        c_inside = channel < c_group
        rows = row + tap // S * dilation_h
        columns = column + tap % S * dilation_w
        inside = pixel_inside & (rows >= 0) & (rows < h) & (columns >= 0) & (columns < width)
        inside = inside[:, None] & c_inside[None, :]
        offset = (((image * h + rows) * width + columns) * c)[:, None] + channel[None, :]
    return offset, inside, index, c_inside


@triton.jit
def rounded(values, ROUND: tl.constexpr):
    """fp32 values rounded to TF32's ten bits, half away from zero: a tensor core that cuts them makes sums too small."""
    if ROUND:
        values = ((values.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return values


@triton.jit
def gather_conv(
    x, w, y, residual, bias,
    pixels, p, q, h, width, c, k, pitch, c_group, k_group, c_blocks, iterations, iterations_split, tiles_k,
    pad_h, pad_w, dilation_h, dilation_w,
    R: tl.constexpr, S: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, FLAT: tl.constexpr, VECTOR_C: tl.constexpr, VECTOR_K: tl.constexpr,
    ACTIVATION: tl.constexpr, PRECISION: tl.constexpr, ROUND: tl.constexpr,
    SPLIT: tl.constexpr, WAIT: tl.constexpr, TRIGGER: tl.constexpr,
):  # fmt: skip
    """One [BLOCK_K channels, BLOCK_P pixels] tile of one group of y, over one share of the reduction.

    w is the weight as [k, r, s, c_group]. The reduction runs over taps and blocks of channels; with FLAT over the r·s·c
    products as one axis, which wastes less where c_group is smaller than a block (the first layer). With SPLIT, y is
    fp32 [splits, pixels, k] and takes the bare sums. Channels come as multiples of VECTOR_C and VECTOR_K: so the compiler
    knows how wide a vector it may load, where Triton's own hint knows multiples of 16 alone. ROUND: see `rounded`; w is rounded.
    """
    c *= VECTOR_C
    c_group *= VECTOR_C
    k *= VECTOR_K
    pitch *= VECTOR_K
    k_group *= VECTOR_K
    follow(WAIT, TRIGGER)
    tile = tl.program_id(0)
    group = tl.program_id(2)
    k_local = (tile % tiles_k) * BLOCK_K + tl.arange(0, BLOCK_K)
    pixel = (tile // tiles_k) * BLOCK_P + tl.arange(0, BLOCK_P)
    k_inside = k_local < k_group
    pixel_inside = pixel < pixels
    image = pixel // (p * q)
    row = pixel // q % p * STRIDE_H - pad_h
    column = pixel % q * STRIDE_W - pad_w
    x += group * c_group
    weight_row = w + (group * k_group + k_local) * (R * S * c_group)
    first = tl.program_id(1) * iterations_split
    last = tl.minimum(first + iterations_split, iterations)
    acc = tl.zeros((BLOCK_K, BLOCK_P), dtype=tl.float32)
    for i in range(first, last):
        offset, inside, index, c_inside = gathered(
            i, row, column, image, pixel_inside, h, width, c, c_group, c_blocks, dilation_h, dilation_w,
            R, S, BLOCK_C, FLAT,
        )  # fmt: skip
        values = rounded(tl.load(x + offset, mask=inside, other=0.0), ROUND)
        weights = tl.load(weight_row[:, None] + index[None, :], mask=k_inside[:, None] & c_inside[None, :], other=0.0)
        acc = tl.dot(weights, values.T, acc, input_precision=PRECISION)
    finish_gathered(
        y, residual, bias, acc.T, pixel, group * k_group + k_local, pixel_inside, k_inside, pixels, k, pitch,
        ACTIVATION, SPLIT,
    )  # fmt: skip
