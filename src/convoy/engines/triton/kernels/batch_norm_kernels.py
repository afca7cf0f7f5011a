"""Batch norm in training, NHWC: one kernel sums over parts of the rows, the next sums the parts and does the rest.

A row is a pixel's channels. Sums are taken in fp32: forward around the first row's values, so that a mean far from zero costs no
digits; backward around the batch's mean. The parts are summed in one order, so every run gives the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from convoy.engines.triton.kernels.tile_begin import follow


@triton.jit
def moments(
    x, parts,
    rows, each, c,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, VECTOR: tl.constexpr, STAGES: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """parts[2, programs, c]: sums of x - first row and of its square, over `each` rows a program."""
    follow(WAIT, WAIT)
    c *= VECTOR
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    known = channel < c
    shift = tl.load(x + channel, mask=known, other=0.0).to(tl.float32)
    first = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.float32)
    second = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.float32)
    begin = tl.program_id(0) * each
    end = tl.minimum(begin + each, rows)
    for start in tl.range(begin, end, BLOCK_R, num_stages=STAGES):
        row = start + tl.arange(0, BLOCK_R)
        here = (row < end)[:, None] & known[None, :]
        value = tl.load(x + (row * c)[:, None] + channel[None, :], mask=here, other=0.0).to(tl.float32)
        value = tl.where(here, value - shift[None, :], 0.0)
        first += value
        second += value * value
    place = tl.program_id(0) * c + channel
    tl.store(parts + place, tl.sum(first, 0), mask=known)
    tl.store(parts + tl.num_programs(0) * c + place, tl.sum(second, 0), mask=known)


@triton.jit
def added(parts, programs, c, channel, known, PARTS: tl.constexpr):
    """Both sums over all parts, for some channels."""
    part = tl.arange(0, PARTS)
    some = (part < programs)[:, None] & known[None, :]
    place = (part * c)[:, None] + channel[None, :]
    first = tl.sum(tl.load(parts + place, mask=some, other=0.0), 0)
    return first, tl.sum(tl.load(parts + programs * c + place, mask=some, other=0.0), 0)


@triton.jit
def normalise(
    x, weight, bias, mean, var, residual, parts, y, save_mean, save_rstd, new_mean, new_var,
    rows, each, c, programs, pitch, inverse, unbiased, momentum, eps,
    RELU: tl.constexpr, RESIDUAL: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, VECTOR: tl.constexpr, STAGES: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """The result y from x and the parts' sums, and all statistics; `inverse` is 1 / rows, `unbiased` rows / (rows - 1)."""
    follow(WAIT, WAIT)
    c *= VECTOR
    pitch *= VECTOR
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    known = channel < c
    first, second = added(parts, programs, c, channel, known, PARTS)
    first *= inverse
    second *= inverse
    middle = tl.load(x + channel, mask=known, other=0.0).to(tl.float32) + first
    spread = tl.maximum(second - first * first, 0.0)
    spread = tl.where(second >= 0.0, spread, second)  # NaN, which maximum() would drop, is below nothing
    rstd = 1.0 / tl.sqrt_rn(spread + eps)
    if tl.program_id(0) == 0:
        old_mean = tl.load(mean + channel, mask=known, other=0.0)
        old_var = tl.load(var + channel, mask=known, other=0.0)
        tl.store(save_mean + channel, middle, mask=known)
        tl.store(save_rstd + channel, rstd, mask=known)
        tl.store(new_mean + channel, old_mean + momentum * (middle - old_mean), mask=known)
        tl.store(new_var + channel, old_var + momentum * (spread * unbiased - old_var), mask=known)
    scale = tl.load(weight + channel, mask=known, other=0.0) * rstd
    offset = tl.load(bias + channel, mask=known, other=0.0)
    begin = tl.program_id(0) * each
    end = tl.minimum(begin + each, rows)
    for start in tl.range(begin, end, BLOCK_R, num_stages=STAGES):
        row = start + tl.arange(0, BLOCK_R)
        here = (row < end)[:, None] & known[None, :]
        at = (row * c)[:, None] + channel[None, :]
        value = tl.load(x + at, mask=here, other=0.0).to(tl.float32)
        value = (value - middle[None, :]) * scale[None, :] + offset[None, :]
        if RESIDUAL:
            value = value.to(y.dtype.element_ty).to(tl.float32)
            value += tl.load(residual + at, mask=here, other=0.0).to(tl.float32)
        if RELU:
            value = tl.where(value < 0.0, 0.0, value)
        tl.store(y + (row * pitch)[:, None] + channel[None, :], value.to(y.dtype.element_ty), mask=here)


@triton.jit
def masked_gradient(
    dy, more, y, there, at, here, MORE: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    """dy, from its own addresses, plus its second summand if there is one; zero where the ReLU's result is zero."""
    gradient = tl.load(dy + there, mask=here, other=0.0).to(tl.float32)
    if MORE:
        gradient += tl.load(more + at, mask=here, other=0.0).to(tl.float32)
        gradient = gradient.to(dy.dtype.element_ty).to(tl.float32)
    if RELU:
        gradient = tl.where(tl.load(y + at, mask=here, other=0.0).to(tl.float32) <= 0.0, 0.0, gradient)
    return gradient


@triton.jit
def gradient_sums(
    dy, more, y, x, mean, parts, masked,
    rows, each, c, pitch,
    MORE: tl.constexpr, RELU: tl.constexpr, MASKED: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, VECTOR: tl.constexpr, STAGES: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """parts[2, programs, c]: sums of the gradient and of the gradient times x - mean; the gradient itself where it is wanted."""
    follow(WAIT, WAIT)
    c *= VECTOR
    pitch *= VECTOR
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    known = channel < c
    middle = tl.load(mean + channel, mask=known, other=0.0)
    first = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.float32)
    second = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.float32)
    begin = tl.program_id(0) * each
    end = tl.minimum(begin + each, rows)
    for start in tl.range(begin, end, BLOCK_R, num_stages=STAGES):
        row = start + tl.arange(0, BLOCK_R)
        here = (row < end)[:, None] & known[None, :]
        at = (row * c)[:, None] + channel[None, :]
        there = (row * pitch)[:, None] + channel[None, :]
        gradient = masked_gradient(dy, more, y, there, at, here, MORE, RELU)
        if MASKED:
            tl.store(masked + at, gradient.to(masked.dtype.element_ty), mask=here)
        value = tl.load(x + at, mask=here, other=0.0).to(tl.float32)
        first += gradient
        second += tl.where(here, gradient * (value - middle[None, :]), 0.0)
    place = tl.program_id(0) * c + channel
    tl.store(parts + place, tl.sum(first, 0), mask=known)
    tl.store(parts + tl.num_programs(0) * c + place, tl.sum(second, 0), mask=known)


@triton.jit
def gradients(
    dy, more, y, x, weight, mean, rstd, parts, dx, dweight, dbias,
    rows, each, c, pitch, programs, inverse,
    MORE: tl.constexpr, RELU: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, VECTOR: tl.constexpr, STAGES: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """dx, dweight and dbias from the parts' sums."""
    follow(WAIT, WAIT)
    c *= VECTOR
    pitch *= VECTOR
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    known = channel < c
    first, second = added(parts, programs, c, channel, known, PARTS)
    middle = tl.load(mean + channel, mask=known, other=0.0)
    scale = tl.load(rstd + channel, mask=known, other=0.0)
    if tl.program_id(0) == 0:
        tl.store(dweight + channel, second * scale, mask=known)
        tl.store(dbias + channel, first, mask=known)
    slope = second * inverse * scale * scale
    even = first * inverse
    scale *= tl.load(weight + channel, mask=known, other=0.0)
    begin = tl.program_id(0) * each
    end = tl.minimum(begin + each, rows)
    for start in tl.range(begin, end, BLOCK_R, num_stages=STAGES):
        row = start + tl.arange(0, BLOCK_R)
        here = (row < end)[:, None] & known[None, :]
        at = (row * c)[:, None] + channel[None, :]
        there = (row * pitch)[:, None] + channel[None, :]
        gradient = masked_gradient(dy, more, y, there, at, here, MORE, RELU)
        value = tl.load(x + at, mask=here, other=0.0).to(tl.float32)
        gradient = (gradient - even[None, :] - (value - middle[None, :]) * slope[None, :]) * scale[None, :]
        tl.store(dx + at, gradient.to(dx.dtype.element_ty), mask=here)
