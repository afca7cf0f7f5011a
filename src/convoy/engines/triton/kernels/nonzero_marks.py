"""Marks of a result, written by the kernel that computes it: which channels are not zero somewhere, and the largest value.

int32 [2, images · slices, words]: a word stands for 32 channels, a slice for some pixels of an image. The first half holds
the largest finite |y|, as an integer of the same bits; 1, the least above zero, stands for infinities and NaN. The second
half has a bit for each channel that is not zero there. `zeroskip_channels_kernels.look` computes the same by reading the
result again.
"""

from __future__ import annotations

import triton
import triton.language as tl

from convoy.engines.triton.kernels.tile_begin import follow
from convoy.engines.triton.kernels.tile_epilogue import activate


@triton.jit
def magnitude_bits(values):
    """|values| as integers that sort like them; infinities and NaN as the least above zero, so that they count as alive."""
    bits = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.where(bits < 0x7F800000, bits, 1)


@triton.jit
def mark_tile(
    out, marks, slices, slice_index, n0, p0, q0, k0, images,
    P: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_W: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Marks of one tile [pixels, BLOCK_K] of the result, a slice of each of its images; what lies outside counts as zero."""
    WORDS: tl.constexpr = (K + 31) // 32
    pixel = tl.arange(0, BLOCK_N * BLOCK_H * BLOCK_W)
    inside = (p0 + pixel // BLOCK_W % BLOCK_H < P) & (q0 + pixel % BLOCK_W < Q)
    real = k0 + tl.arange(0, BLOCK_K) < K
    bits = tl.where(inside[:, None] & real[None, :], magnitude_bits(out), 0)
    groups = tl.max(bits.reshape(BLOCK_N, BLOCK_H * BLOCK_W, BLOCK_K), axis=1).reshape(BLOCK_N, BLOCK_K // 32, 32)
    alive = tl.sum((groups > 0).to(tl.int32) << tl.arange(0, 32)[None, None, :], axis=2)
    image, word = n0 + tl.arange(0, BLOCK_N), k0 // 32 + tl.arange(0, BLOCK_K // 32)
    to = marks + (image * slices + slice_index)[:, None] * WORDS + word[None, :]
    there = (image < images)[:, None] & (word < WORDS)[None, :]
    tl.store(to, tl.max(groups, axis=2), mask=there)
    tl.store(to + images * slices * WORDS, alive, mask=there)


@triton.jit
def reduce_marking(
    partial, y, residual, bias, marks, pixels, k, words, images,
    SPLITS: tl.constexpr, BLOCK_P: tl.constexpr, ACTIVATION: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """As `reduce_splits`, 32 channels of a slice of an image's pixels a block, with their marks: grid (slices, words, images)."""
    follow(WAIT, WAIT)
    slices = tl.num_programs(0)
    word = tl.program_id(1)
    image = tl.program_id(2)
    share = tl.cdiv(pixels, slices)
    first = tl.program_id(0) * share
    last = tl.minimum(first + share, pixels)
    channel = word * 32 + tl.arange(0, 32)
    part_elements = (images * pixels).to(tl.int64) * k
    shift = tl.zeros((32,), dtype=tl.float32)
    if bias is not None:
        shift = tl.load(bias + channel, mask=channel < k, other=0.0).to(tl.float32)
    largest = tl.zeros((BLOCK_P, 32), dtype=tl.int32)
    for start in range(first, last, BLOCK_P):
        pixel = start + tl.arange(0, BLOCK_P)
        inside = (pixel < last)[:, None] & (channel < k)[None, :]
        place = (image * pixels + pixel).to(tl.int64)[:, None] * k + channel[None, :]
        total = tl.load(partial + place, mask=inside, other=0.0)
        for split in tl.static_range(1, SPLITS):
            total += tl.load(partial + split * part_elements + place, mask=inside, other=0.0)
        if bias is not None:
            total += shift[None, :]
        if residual is not None:
            total += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
        total = activate(total, ACTIVATION)
        tl.store(y + place, total, mask=inside)
        largest = tl.maximum(largest, tl.where(inside, magnitude_bits(total), 0))
    of_channel = tl.max(largest, axis=0)
    to = marks + (image * slices + tl.program_id(0)) * words + word
    tl.store(to, tl.max(of_channel, axis=0))
    tl.store(to + images * slices * words, tl.sum((of_channel > 0).to(tl.int32) << tl.arange(0, 32), axis=0))
