"""Group norm of NHWC images with ReLU, SiLU or a leaky ReLU: one kernel sums over parts of an image, the next normalises.

Sums are taken in fp32 for each channel, around the image's first pixel, so that a mean far from zero costs no digits. The second
kernel adds the parts in one order and puts channels together to groups by their means and squared deviations (Chan's formula).
"""

from __future__ import annotations

import triton
import triton.language as tl

from convoy.engines.triton.kernels.tile_begin import follow


@triton.jit
def channels_of_groups(groups, SIZE: tl.constexpr, PADDED: tl.constexpr, BLOCK_C: tl.constexpr):
    """A tile's channels, those of whole groups: `SIZE` to a group, in places for a power of two; and which of them there are."""
    lane = tl.arange(0, BLOCK_C)
    if SIZE == PADDED:
        channel = tl.program_id(2) * BLOCK_C + lane
        known = channel < groups * SIZE
    else:
        group = tl.program_id(2) * (BLOCK_C // PADDED) + lane // PADDED
        channel = group * SIZE + lane % PADDED
        known = (lane % PADDED < SIZE) & (group < groups)
    return channel, known


@triton.jit
def group_moments(
    x, parts,
    pixels, each, groups,
    SIZE: tl.constexpr, PADDED: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """parts[2, images, programs, c]: sums of x - first pixel and of its square, over `each` pixels a program."""
    follow(WAIT, WAIT)
    channel, known = channels_of_groups(groups, SIZE, PADDED, BLOCK_C)
    c = groups * SIZE
    image = tl.program_id(1)
    x += image * pixels * c
    shift = tl.load(x + channel, mask=known, other=0.0).to(tl.float32)
    first = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.float32)
    second = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.float32)
    begin = tl.program_id(0) * each
    end = tl.minimum(begin + each, pixels)
    for start in range(begin, end, BLOCK_R):
        pixel = start + tl.arange(0, BLOCK_R)
        here = (pixel < end)[:, None] & known[None, :]
        value = tl.load(x + (pixel * c)[:, None] + channel[None, :], mask=here, other=0.0).to(tl.float32)
        value = tl.where(here, value - shift[None, :], 0.0)
        first += value
        second += value * value
    programs = tl.num_programs(0)
    place = (image * programs + tl.program_id(0)) * c + channel
    tl.store(parts + place, tl.sum(first, 0), mask=known)
    tl.store(parts + tl.num_programs(1) * programs * c + place, tl.sum(second, 0), mask=known)


@triton.jit
def by_group(values, PADDED: tl.constexpr, BLOCK_C: tl.constexpr):
    """The sum over each channel's group, for each channel."""
    table = tl.reshape(values, (BLOCK_C // PADDED, PADDED))
    sums = tl.sum(table, 1)
    return tl.reshape(tl.broadcast_to(sums[:, None], (BLOCK_C // PADDED, PADDED)), (BLOCK_C,))


@triton.jit
def group_normalise(
    x, scale, shift, slopes, parts, y,
    pixels, each, groups, programs, inverse, eps,
    SIZE: tl.constexpr, PADDED: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, PARTS: tl.constexpr,
    AFFINE: tl.constexpr, RELU: tl.constexpr, SILU: tl.constexpr, LEAKY: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """Y from the parts' sums; `inverse` is 1 / pixels."""
    follow(WAIT, WAIT)
    channel, known = channels_of_groups(groups, SIZE, PADDED, BLOCK_C)
    c = groups * SIZE
    image = tl.program_id(1)
    x += image * pixels * c
    y += image * pixels * c
    row = tl.arange(0, PARTS)
    there = (row < programs)[:, None] & known[None, :]
    place = (image * programs + row)[:, None] * c + channel[None, :]
    first = tl.sum(tl.load(parts + place, mask=there, other=0.0), 0)
    second = tl.sum(tl.load(parts + tl.num_programs(1) * programs * c + place, mask=there, other=0.0), 0)
    middle = tl.load(x + channel, mask=known, other=0.0).to(tl.float32) + first * inverse
    mean = by_group(tl.where(known, middle, 0.0), PADDED, BLOCK_C) / SIZE
    apart = tl.where(known, middle - mean, 0.0)
    squares = tl.where(known, tl.maximum(second * inverse - first * inverse * (first * inverse), 0.0), 0.0)
    variance = by_group(squares + apart * apart, PADDED, BLOCK_C) / SIZE
    factor = 1.0 / tl.sqrt(variance + eps)
    summand = tl.zeros((BLOCK_C,), dtype=tl.float32)
    if AFFINE:
        factor *= tl.load(scale + channel, mask=known, other=0.0)
        summand += tl.load(shift + channel, mask=known, other=0.0)
    if LEAKY:
        slope = tl.load(slopes + channel, mask=known, other=0.0)
    begin = tl.program_id(0) * each
    end = tl.minimum(begin + each, pixels)
    for start in range(begin, end, BLOCK_R):
        pixel = start + tl.arange(0, BLOCK_R)
        here = (pixel < end)[:, None] & known[None, :]
        at = (pixel * c)[:, None] + channel[None, :]
        value = tl.load(x + at, mask=here, other=0.0).to(tl.float32)
        value = (value - mean[None, :]) * factor[None, :] + summand[None, :]
        if RELU:
            value = tl.where(value < 0.0, 0.0, value)
        if LEAKY:
            value = tl.where(value < 0.0, value * slope[None, :], value)
        if SILU:
            value = value / (1.0 + tl.exp(-value))
        tl.store(y + at, value.to(y.dtype.element_ty), mask=here)
