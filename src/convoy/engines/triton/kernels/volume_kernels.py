"""Three-dimensional convolution as an implicit GEMM: out[pixels, channels] = X · W^T, by TMA boxes or by gathered loads."""

# ruff: noqa: RUF005 - Triton knows no (*tuple, value)
from __future__ import annotations

import triton
import triton.language as tl

from convoy.engines.triton.kernels.gather_kernel import finish_gathered, rounded
from convoy.engines.triton.kernels.igemm_swap_ab_kernel import load_pixels
from convoy.engines.triton.kernels.tile_begin import follow
from convoy.engines.triton.kernels.tile_epilogue import activate


@triton.constexpr_function
def tap_of(j, o, taps, stride, dilation):
    """Which tap of depth reads a tile's slice j for slice o of the result; -1: none."""
    tap, rest = divmod(j - o * stride, dilation)
    return tap if rest == 0 and 0 <= tap < taps else -1


@triton.constexpr_function
def is_read(j, taps, stride, dilation, depth):
    """Whether any tap of depth reads a tile's slice j."""
    return any((j - o * stride) % dilation == 0 and 0 <= (j - o * stride) // dilation < taps for o in range(depth))


@triton.jit
def load_slices(
    x, image, z, depth, p0, q0, tap, c0, channels, pad_h, pad_w, dilation_h, dilation_w,
    S: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_W: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """One tap's [pixels, channels] tile of BLOCK_D slices of a volume, the first at depth z; zeros outside the volume.

    Stride 1 in height and width reads x[n, d, h, w, c]. Other strides read the view of slices that `load_pixels` describes:
    TMA has no sixth dimension. There a slice outside the volume is number -1, so that TMA fills it with zeros.
    """
    if STRIDE_H == 1 and STRIDE_W == 1:
        row = p0 + (tap // S) * dilation_h - pad_h
        column = q0 + (tap % S) * dilation_w - pad_w
        tile = x.load([image, z, row, column, c0]).reshape(BLOCK_D * BLOCK_H * BLOCK_W, BLOCK_C)
    else:
        number = tl.where((z >= 0) & (z < depth), image * depth + z, -1)
        tile = load_pixels(
            x, number, p0, q0, tap, c0, channels, pad_h, pad_w, dilation_h, dilation_w,
            S, STRIDE_H, STRIDE_W, 1, BLOCK_H, BLOCK_W, BLOCK_C,
        )  # fmt: skip
    return tile


@triton.jit
def shared_products(
    sums, x, w, row, image, z0, depth, p0, q0, tap, c0, channels, pad_h, pad_w, dilation_h, dilation_w,
    T: tl.constexpr, S: tl.constexpr, STRIDE_D: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    DILATION_D: tl.constexpr, DEPTH: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_W: tl.constexpr,
    BLOCK_C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The sums of DEPTH neighbouring slices of y, with one tap of height and width, all taps of depth, a block of channels."""
    weights = ()
    for t in tl.static_range(T):
        weights = weights + (w.load([row + t * BLOCK_K, 0]),)
    for j in tl.static_range((DEPTH - 1) * STRIDE_D + (T - 1) * DILATION_D + 1):
        if is_read(j, T, STRIDE_D, DILATION_D, DEPTH):
            pixels = load_slices(
                x, image, z0 + j, depth, p0, q0, tap, c0, channels, pad_h, pad_w, dilation_h, dilation_w,
                S, STRIDE_H, STRIDE_W, 1, BLOCK_H, BLOCK_W, BLOCK_C,
            )  # fmt: skip
            added = ()
            for o in tl.static_range(DEPTH):
                if tap_of(j, o, T, STRIDE_D, DILATION_D) >= 0:
                    factors = weights[tap_of(j, o, T, STRIDE_D, DILATION_D)].T
                    added = added + (tl.dot(pixels, factors, sums[o], input_precision=PRECISION),)
                else:
                    added = added + (sums[o],)
            sums = added
    return sums


@triton.jit
def store_slice(
    y, residual, bias, out, image, d, p0, q0, k0, images,
    BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_W: tl.constexpr, ACTIVATION: tl.constexpr,
    DTYPE: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Store a box of [pixels, BLOCK_K] sums: bare partial sums, or sums with bias, residual and activation."""
    if SPLIT:
        image += tl.program_id(1) * images
    else:
        if bias is not None:
            out += tl.load(bias + k0 + tl.arange(0, BLOCK_K))[None, :].to(tl.float32)
        if residual is not None:
            other = residual.load([image, d, p0, q0, k0])
            out += other.reshape(BLOCK_D * BLOCK_H * BLOCK_W, BLOCK_K).to(tl.float32)
        out = activate(out, ACTIVATION)
    y.store([image, d, p0, q0, k0], out.to(DTYPE).reshape(1, BLOCK_D, BLOCK_H, BLOCK_W, BLOCK_K))


@triton.jit
def volume_conv(
    x, w, y, residual, bias,
    tiles_k, tiles_d, tiles_h, tiles_w, c_blocks, iterations, iterations_split, images, depth, channels,
    pad_d, pad_h, pad_w, dilation_h, dilation_w,
    T: tl.constexpr, S: tl.constexpr, STRIDE_D: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    DILATION_D: tl.constexpr, DEPTH: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_W: tl.constexpr, BLOCK_C: tl.constexpr, ACTIVATION: tl.constexpr, PRECISION: tl.constexpr,
    DTYPE: tl.constexpr, SPLIT: tl.constexpr, WAIT: tl.constexpr, TRIGGER: tl.constexpr,
):  # fmt: skip
    """DEPTH tiles of BLOCK_D x BLOCK_H x BLOCK_W pixels and BLOCK_K channels of y, one slice apart, over one share of the sum.

    With DEPTH 1 an iteration is a tap and a block of channels, and the product is W · X^T, as in `swapped_conv`. Otherwise an
    iteration has all taps of depth: it loads each slice of x once and multiplies it for all of the DEPTH tiles that read it, by
    X · W^T with X in registers. For a filter of depth 3, DEPTH 4 loads 6 slices, not 12.
    Either DEPTH or BLOCK_D is 1. w is packed as rows [tile, tap of height and width, block of channels, t, BLOCK_K] of
    BLOCK_C; y is [images, d, p, q, k] or, with SPLIT, fp32 sums [splits x images, d, p, q, k].
    """
    PIXELS: tl.constexpr = BLOCK_D * BLOCK_H * BLOCK_W
    tile = tl.program_id(0)
    tile_k = tile % tiles_k
    box = tile // tiles_k // tiles_w
    q0 = (tile // tiles_k % tiles_w) * BLOCK_W
    p0 = (box % tiles_h) * BLOCK_H
    d0 = (box // tiles_h % tiles_d) * (DEPTH * BLOCK_D)
    image = box // tiles_h // tiles_d
    z0 = d0 * STRIDE_D - pad_d
    first = tl.program_id(1) * iterations_split
    last = tl.minimum(first + iterations_split, iterations)
    follow(WAIT, TRIGGER)
    sums = ()
    for _ in tl.static_range(DEPTH):
        sums = sums + (tl.zeros((BLOCK_K, PIXELS) if DEPTH == 1 else (PIXELS, BLOCK_K), dtype=tl.float32),)
    for i in range(first, last):
        if DEPTH == 1:
            pixels = load_slices(
                x, image, z0 + i % T * DILATION_D, depth, p0, q0, i // T // c_blocks, i // T % c_blocks * BLOCK_C, channels,
                pad_h, pad_w, dilation_h, dilation_w, S, STRIDE_H, STRIDE_W, BLOCK_D, BLOCK_H, BLOCK_W, BLOCK_C,
            )  # fmt: skip
            weights = w.load([(tile_k * iterations + i) * BLOCK_K, 0])
            sums = (tl.dot(weights, pixels.T, sums[0], input_precision=PRECISION),)
        else:
            row = (tile_k * iterations + i) * (T * BLOCK_K)
            sums = shared_products(
                sums, x, w, row, image, z0, depth, p0, q0, i // c_blocks, i % c_blocks * BLOCK_C, channels, pad_h, pad_w,
                dilation_h, dilation_w, T, S, STRIDE_D, STRIDE_H, STRIDE_W, DILATION_D, DEPTH, BLOCK_K, BLOCK_H, BLOCK_W,
                BLOCK_C, PRECISION,
            )  # fmt: skip
    for o in tl.static_range(DEPTH):
        store_slice(
            y, residual, bias, sums[o].T if DEPTH == 1 else sums[o], image, d0 + o, p0, q0, tile_k * BLOCK_K, images,
            BLOCK_K, BLOCK_D, BLOCK_H, BLOCK_W, ACTIVATION, DTYPE, SPLIT,
        )  # fmt: skip


@triton.jit
def gathered_volume(
    i, z, row, column, image, pixel_inside, depth, h, width, c, c_blocks, dilation_d, dilation_h, dilation_w,
    T: tl.constexpr, R: tl.constexpr, S: tl.constexpr, BLOCK_C: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    """One step of the reduction: where its [pixels, BLOCK_C] values lie and which there are, and the same of its weights."""
    if FLAT:
        index = i * BLOCK_C + tl.arange(0, BLOCK_C)
        tap = index // c
        channel = (index - tap * c)[None, :]
        c_inside = index < T * R * S * c
        slices = z[:, None] + (tap // (R * S) * dilation_d)[None, :]
        rows = row[:, None] + (tap // S % R * dilation_h)[None, :]
        columns = column[:, None] + (tap % S * dilation_w)[None, :]
        images = image[:, None]
        inside = pixel_inside[:, None] & c_inside[None, :]
    else:
        tap = i // c_blocks
        channel = (i - tap * c_blocks) * BLOCK_C + tl.arange(0, BLOCK_C)
        index = tap * c + channel
        c_inside = channel < c
        channel = channel[None, :]
        slices = (z + tap // (R * S) * dilation_d)[:, None]
        rows = (row + tap // S % R * dilation_h)[:, None]
        columns = (column + tap % S * dilation_w)[:, None]
        images = image[:, None]
        inside = pixel_inside[:, None]
    inside &= (slices >= 0) & (slices < depth) & (rows >= 0) & (rows < h) & (columns >= 0) & (columns < width)
    offset = (((images * depth + slices) * h + rows) * width + columns) * c + channel
    return offset, inside & c_inside[None, :], index, c_inside


@triton.jit
def volume_gather(
    x, w, y, residual, bias,
    pixels, out_d, p, q, depth, h, width, c, k, c_blocks, iterations, iterations_split, tiles_k,
    pad_d, pad_h, pad_w, dilation_d, dilation_h, dilation_w,
    T: tl.constexpr, R: tl.constexpr, S: tl.constexpr, STRIDE_D: tl.constexpr, STRIDE_H: tl.constexpr,
    STRIDE_W: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, FLAT: tl.constexpr,
    VECTOR_C: tl.constexpr, VECTOR_K: tl.constexpr, ACTIVATION: tl.constexpr, PRECISION: tl.constexpr,
    ROUND: tl.constexpr, SPLIT: tl.constexpr, WAIT: tl.constexpr, TRIGGER: tl.constexpr,
):  # fmt: skip
    """One [BLOCK_P pixels, BLOCK_K channels] tile of y, over one share of the reduction, for every size of volume and filter.

    As `gather_conv`, with one side more: w is [k, t, r, s, c], and the reduction runs over taps and blocks of channels or, with
    FLAT, over all t·r·s·c products as one axis. Channels come as multiples of VECTOR_C and VECTOR_K.
    """
    c *= VECTOR_C
    k *= VECTOR_K
    follow(WAIT, TRIGGER)
    tile = tl.program_id(0)
    channel = (tile % tiles_k) * BLOCK_K + tl.arange(0, BLOCK_K)
    pixel = (tile // tiles_k) * BLOCK_P + tl.arange(0, BLOCK_P)
    k_inside = channel < k
    pixel_inside = pixel < pixels
    image = pixel // (out_d * p * q)
    z = pixel // (p * q) % out_d * STRIDE_D - pad_d
    row = pixel // q % p * STRIDE_H - pad_h
    column = pixel % q * STRIDE_W - pad_w
    weight_row = w + channel * (T * R * S * c)
    first = tl.program_id(1) * iterations_split
    last = tl.minimum(first + iterations_split, iterations)
    acc = tl.zeros((BLOCK_P, BLOCK_K), dtype=tl.float32)
    for i in range(first, last):
        offset, inside, index, c_inside = gathered_volume(
            i, z, row, column, image, pixel_inside, depth, h, width, c, c_blocks, dilation_d, dilation_h, dilation_w,
            T, R, S, BLOCK_C, FLAT,
        )  # fmt: skip
        values = rounded(tl.load(x + offset, mask=inside, other=0.0), ROUND)
        weights = tl.load(weight_row[:, None] + index[None, :], mask=k_inside[:, None] & c_inside[None, :], other=0.0)
        acc = tl.dot(values, weights.T, acc, input_precision=PRECISION)
    finish_gathered(
        y, residual, bias, acc, pixel, channel, pixel_inside, k_inside, pixels, k, k, ACTIVATION, SPLIT
    )  # fmt: skip
