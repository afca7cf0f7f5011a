"""Squeeze-and-excitation of NHWC images: one kernel takes the first layer's sums in parts, the next makes and applies the gate.

The first layer is linear in the mean, so a program multiplies the sums of its own pixels and channels by the weights and stores
the result. The second kernel adds these parts in one order, so equal inputs give equal bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from convoy.engines.triton.kernels.tile_begin import follow
from convoy.engines.triton.kernels.tile_epilogue import activate


@triton.jit
def squeeze(
    x, weight, parts,
    pixels, each, c, hidden, inverse,
    BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_H: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """parts[images, programs, hidden]: weight[hidden, c] times the sums of x over `each` pixels and a tile of channels.

    `inverse` is 1 / pixels. Weights are read before the wait for the kernel before: nobody writes them.
    """
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    known = channel < c
    place = tl.arange(0, BLOCK_H)
    factors = tl.load(
        weight + (place * c)[:, None] + channel[None, :], mask=(place < hidden)[:, None] & known[None, :], other=0.0
    )
    follow(WAIT, WAIT)
    image = tl.program_id(2)
    x += image * pixels * c
    total = tl.zeros((BLOCK_P, BLOCK_C), dtype=tl.float32)
    begin = tl.program_id(0) * each
    end = tl.minimum(begin + each, pixels)
    for start in range(begin, end, BLOCK_P):
        pixel = start + tl.arange(0, BLOCK_P)
        here = (pixel < end)[:, None] & known[None, :]
        total += tl.load(x + (pixel * c)[:, None] + channel[None, :], mask=here, other=0.0).to(tl.float32)
    means = tl.sum(total, 0) * inverse
    program = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    parts += (image * tl.num_programs(0) * tl.num_programs(1) + program) * hidden
    tl.store(parts + place, tl.sum(factors.to(tl.float32) * means[None, :], 1), mask=place < hidden)
    for first in range(BLOCK_H, hidden, BLOCK_H):
        place = first + tl.arange(0, BLOCK_H)
        factors = tl.load(
            weight + (place * c)[:, None] + channel[None, :], mask=(place < hidden)[:, None] & known[None, :], other=0.0
        )
        tl.store(parts + place, tl.sum(factors.to(tl.float32) * means[None, :], 1), mask=place < hidden)


@triton.jit
def hidden_values(parts, bias, place, hidden, programs, PARTS: tl.constexpr, INNER: tl.constexpr):
    """A tile of the first layer's results: its parts in order, the bias, the activation; 0 behind the last one."""
    row = tl.arange(0, PARTS)
    there = (row < programs)[:, None] & (place < hidden)[None, :]
    value = tl.sum(tl.load(parts + (row * hidden)[:, None] + place[None, :], mask=there, other=0.0), 0)
    if bias is not None:
        value += tl.load(bias + place, mask=place < hidden, other=0.0)
    return tl.where(place < hidden, activate(value, INNER), 0.0)


@triton.jit
def excite(
    x, bias, weight, shift, parts, residual, y,
    pixels, each, c, hidden, programs,
    PARTS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_H: tl.constexpr,
    INNER: tl.constexpr, OUTER: tl.constexpr, RELU: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """Y from the parts: the gate of a tile of channels by weight[hidden, c] and `shift`, times x, plus the residual."""
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    known = channel < c
    place = tl.arange(0, BLOCK_H)
    factors = tl.load(
        weight + (place * c)[:, None] + channel[None, :], mask=(place < hidden)[:, None] & known[None, :], other=0.0
    )
    follow(WAIT, WAIT)
    image = tl.program_id(2)
    parts += image * programs * hidden
    values = hidden_values(parts, bias, place, hidden, programs, PARTS, INNER)
    gate = tl.sum(factors.to(tl.float32) * values[:, None], 0)
    for first in range(BLOCK_H, hidden, BLOCK_H):
        place = first + tl.arange(0, BLOCK_H)
        factors = tl.load(
            weight + (place * c)[:, None] + channel[None, :], mask=(place < hidden)[:, None] & known[None, :], other=0.0
        )
        values = hidden_values(parts, bias, place, hidden, programs, PARTS, INNER)
        gate += tl.sum(factors.to(tl.float32) * values[:, None], 0)
    if shift is not None:
        gate += tl.load(shift + channel, mask=known, other=0.0)
    gate = activate(gate, OUTER)
    x += image * pixels * c
    y += image * pixels * c
    if residual is not None:
        residual += image * pixels * c
    begin = tl.program_id(0) * each
    end = tl.minimum(begin + each, pixels)
    for start in range(begin, end, BLOCK_P):
        pixel = start + tl.arange(0, BLOCK_P)
        here = (pixel < end)[:, None] & known[None, :]
        at = (pixel * c)[:, None] + channel[None, :]
        value = tl.load(x + at, mask=here, other=0.0).to(tl.float32) * gate[None, :]
        if residual is not None:
            value += tl.load(residual + at, mask=here, other=0.0).to(tl.float32)
        if RELU:
            value = activate(value, "relu")
        tl.store(y + at, value.to(y.dtype.element_ty), mask=here)
