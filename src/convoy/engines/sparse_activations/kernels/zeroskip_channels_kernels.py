"""Split products over the channels of an image that are alive: those with anything but zeros.

Three steps, which `triton.split_fp32` has too: a look at x (the largest |x| there, here also which channels are alive), the split
into two fp16 planes (here with live channels moved to the front), the product (here over these alone, their weights gathered row
by row). So looking for zeros costs no pass over x.
"""

from __future__ import annotations

import triton
import triton.language as tl

from convoy.engines.triton.kernels.igemm_swap_ab_kernel import load_pixels, prefetch_weights
from convoy.engines.triton.kernels.nonzero_marks import magnitude_bits, mark_tile
from convoy.engines.triton.kernels.split_fp32_kernels import split_sum
from convoy.engines.triton.kernels.tile_begin import follow
from convoy.engines.triton.kernels.tile_epilogue import activate


@triton.jit
def either(a, b):
    """Bits of both."""
    return a | b


@triton.jit
def look(x, maxima, alive, pixels, c, words, BLOCK_P: tl.constexpr, WAIT: tl.constexpr):
    """One word of 32 channels over one slice of the pixels of one image: grid (slices, words, images).

    alive[image, slice, word] has a bit for each channel that is not zero there. maxima[image, slice, word] is the largest finite
    |x|, as an integer of the same bits; 1, the least above zero, stands for infinities and NaN, so that they are alive.
    """
    follow(WAIT, WAIT)
    slices = tl.num_programs(0)
    word = tl.program_id(1)
    image = tl.program_id(2)
    share = tl.cdiv(pixels, slices)
    first = tl.program_id(0) * share
    last = tl.minimum(first + share, pixels)
    channel = word * 32 + tl.arange(0, 32)
    largest = tl.zeros((BLOCK_P, 32), dtype=tl.int32)
    for start in range(first, last, BLOCK_P):
        pixel = start + tl.arange(0, BLOCK_P)
        inside = (pixel < last)[:, None] & (channel < c)[None, :]
        place = (image * pixels + pixel).to(tl.int64)[:, None] * c + channel[None, :]
        largest = tl.maximum(largest, magnitude_bits(tl.load(x + place, mask=inside, other=0.0)))
    of_channel = tl.max(largest, axis=0)
    to = (image * slices + tl.program_id(0)) * words + word
    tl.store(alive + to, tl.sum((of_channel > 0).to(tl.int32) << tl.arange(0, 32), axis=0))
    tl.store(maxima + to, tl.max(of_channel, axis=0))


@triton.jit
def live_order(
    alive, group, channel, c, words, alive_rows, dense_from, all_alive,
    ROWS: tl.constexpr, WORDS: tl.constexpr, GROUP: tl.constexpr, IMAGES: tl.constexpr,
):  # fmt: skip
    """Where each channel of a group goes, the live ones first; how many are alive; and whether so many that none moves."""
    C: tl.constexpr = 32 * WORDS
    # The images of a group lie one after another, each with its slices; the last group may have fewer.
    line = group * GROUP * alive_rows + tl.arange(0, ROWS)
    line_inside = (tl.arange(0, ROWS) < GROUP * alive_rows) & (line < IMAGES * alive_rows)
    word = tl.arange(0, WORDS)
    bits = tl.load(
        alive + line[:, None] * words + word[None, :], mask=line_inside[:, None] & (word < words)[None, :], other=0
    )
    found = tl.reduce(bits, 0, either)
    flags = ((found[:, None] >> tl.arange(0, 32)[None, :]) & 1).reshape(C)
    flags = tl.where(channel < c, flags | all_alive, 0)
    count = tl.sum(flags, axis=0)
    before = tl.cumsum(flags, axis=0) - flags
    dense = count >= dense_from
    position = tl.where(flags > 0, before, count + channel - before)
    position = tl.where(dense, channel, position)
    return position, count, dense


@triton.jit
def split_live(
    x, maxima, alive, inverse, planes, order, counts, w_bytes, pixels, c, words, looked, alive_rows, dense_from, elements,
    all_alive, weight_bytes,
    MAXIMA: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
    GROUP: tl.constexpr, IMAGES: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """planes[0] = hi, planes[1] = lo of x with the group's live channels in front: grid (blocks of pixels, images).

    A group is GROUP images, whose channels are listed together: order[group] are its channels, the live ones first and ascending,
    counts[group] how many are alive; all, in their order, from `dense_from` on. Of the rest only what fills the last block of
    BLOCK_C is written. inverse[0] = 1 / s. Where all are multiplied, their weights are asked for to be brought to L2.
    """
    C: tl.constexpr = 32 * WORDS
    follow(WAIT, WAIT)
    image = tl.program_id(1)
    group = image // GROUP
    pixel = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    channel = tl.arange(0, C)
    inside = (pixel < pixels)[:, None] & (channel < c)[None, :]
    row = (image * pixels + pixel).to(tl.int64) * c
    value = tl.load(x + row[:, None] + channel[None, :], mask=inside, other=0.0)
    index = tl.arange(0, MAXIMA)
    largest = tl.max(tl.load(maxima + index, mask=index < looked, other=0), axis=0)
    position, count, dense = live_order(
        alive, group, channel, c, words, alive_rows, dense_from, all_alive, ROWS, WORDS, GROUP, IMAGES
    )
    if (tl.program_id(0) == 0) & (image == group * GROUP):
        tl.store(order + group * c + position, channel, mask=channel < c)
        tl.store(counts + group, tl.where(dense, c, count))

    exponent = largest >> 23
    # The exponents of s and 1 / s, with fp32's bias: both stay normal numbers.
    scale_exponent = tl.minimum(tl.maximum(268 - exponent, 1), 253)
    value *= (scale_exponent << 23).to(tl.float32, bitcast=True)
    high = value.to(tl.float16)
    low = (value - high.to(tl.float32)) * 2048.0
    # An infinity or NaN stays in hi alone.
    low = tl.where(tl.abs(value) < 65504.0, low, 0.0).to(tl.float16)
    if dense:
        if w_bytes is not None:
            share = tl.program_id(0) + image * tl.num_programs(0)
            prefetch_weights(w_bytes, 0, weight_bytes, share, tl.num_programs(0) * IMAGES, 4)
        to = planes + row[:, None] + channel[None, :]
        tl.store(to, high, mask=inside)
        tl.store(to + elements.to(tl.int64), low, mask=inside)
    else:
        wanted = position < tl.cdiv(count, BLOCK_C) * BLOCK_C
        to = planes + row[:, None] + position[None, :]
        tl.store(to, high, mask=inside & wanted[None, :])
        tl.store(to + elements.to(tl.int64), low, mask=inside & wanted[None, :])
    first = (tl.program_id(0) == 0) & (image == 0)
    tl.store(inverse, ((254 - scale_exponent) << 23).to(tl.float32, bitcast=True), mask=first)


@triton.jit
def live_sum(
    x, weights, order, count, n0, p0, q0, k0, share, shares, factor, weight_rows, k_padded, images, channels,
    pad_h, pad_w, dilation_h, dilation_w,
    R: tl.constexpr, S: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_C: tl.constexpr,
    BODY_FIRST: tl.constexpr,
):  # fmt: skip
    """As `split_sum`, over one share of the taps and blocks of live channels; weights is [2, r·s·c, k_padded]."""
    PIXELS: tl.constexpr = BLOCK_N * BLOCK_H * BLOCK_W
    blocks = tl.cdiv(count, BLOCK_C)
    each = tl.cdiv(R * S * blocks, shares)
    first = share * each
    last = tl.minimum(first + each, R * S * blocks)
    k_index = k0 + tl.arange(0, BLOCK_K)
    total = tl.zeros((BLOCK_K, PIXELS), dtype=tl.float32)
    correction = tl.zeros((BLOCK_K, PIXELS), dtype=tl.float32)
    for i in range(first, last):
        tap = i // blocks
        c0 = (i - tap * blocks) * BLOCK_C
        entry = c0 + tl.arange(0, BLOCK_C)
        listed = entry < count
        channel = tl.load(order + entry, mask=listed, other=0)
        row = (tap * channels + channel)[:, None] * k_padded + k_index[None, :]
        w_high = tl.load(weights + row, mask=listed[:, None], other=0.0)
        w_low = tl.load(weights + weight_rows.to(tl.int64) * k_padded + row, mask=listed[:, None], other=0.0)
        x_high = load_pixels(
            x, n0, p0, q0, tap, c0, channels, pad_h, pad_w, dilation_h, dilation_w,
            S, STRIDE_H, STRIDE_W, BLOCK_N, BLOCK_H, BLOCK_W, BLOCK_C,
        )  # fmt: skip
        x_low = load_pixels(
            x, images + n0, p0, q0, tap, c0, channels, pad_h, pad_w, dilation_h, dilation_w,
            S, STRIDE_H, STRIDE_W, BLOCK_N, BLOCK_H, BLOCK_W, BLOCK_C,
        )  # fmt: skip
        if BODY_FIRST:
            total += tl.dot(w_high.T, x_high.T) * factor
        correction = tl.dot(w_high.T, x_low.T, correction)
        correction = tl.dot(w_low.T, x_high.T, correction)
        if not BODY_FIRST:
            total += tl.dot(w_high.T, x_high.T) * factor
    return total + correction * (factor * 0.00048828125)


@triton.jit
def live_conv(
    x, w, y, residual, bias, weights, order, counts, x_inverse, w_inverse,
    tiles_k, tiles_h, tiles_w, c_blocks, iterations, iterations_split, images, channels,
    pad_h, pad_w, dilation_h, dilation_w, k_padded, marks,
    R: tl.constexpr, S: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_C: tl.constexpr,
    ACTIVATION: tl.constexpr, SPLIT: tl.constexpr, BODY_FIRST: tl.constexpr, WAIT: tl.constexpr,
    MARK_P: tl.constexpr, MARK_Q: tl.constexpr, MARK_K: tl.constexpr,
):  # fmt: skip
    """As `split_conv`; where channels of the tile's images are dead, over the others alone."""
    follow(WAIT, WAIT)
    PIXELS: tl.constexpr = BLOCK_N * BLOCK_H * BLOCK_W
    tile = tl.program_id(0)
    tile_k = tile % tiles_k
    rest = tile // tiles_k
    q0 = (rest % tiles_w) * BLOCK_W
    rest = rest // tiles_w
    p0 = (rest % tiles_h) * BLOCK_H
    group = rest // tiles_h
    n0 = group * BLOCK_N
    k0 = tile_k * BLOCK_K
    factor = tl.load(x_inverse)
    count = tl.load(counts + group)
    if count == channels:
        first = tl.program_id(1) * iterations_split
        last = tl.minimum(first + iterations_split, iterations)
        out = split_sum(
            x, w, n0, p0, q0, tile_k, first, last, factor, tiles_k, c_blocks, iterations, images, channels,
            pad_h, pad_w, dilation_h, dilation_w,
            S, STRIDE_H, STRIDE_W, BLOCK_K, BLOCK_N, BLOCK_H, BLOCK_W, BLOCK_C, BODY_FIRST,
        )  # fmt: skip
    else:
        out = live_sum(
            x, weights, order + group * channels, count, n0, p0, q0, k0, tl.program_id(1), tl.num_programs(1), factor,
            R * S * channels, k_padded, images, channels, pad_h, pad_w, dilation_h, dilation_w,
            R, S, STRIDE_H, STRIDE_W, BLOCK_K, BLOCK_N, BLOCK_H, BLOCK_W, BLOCK_C, BODY_FIRST,
        )  # fmt: skip
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
