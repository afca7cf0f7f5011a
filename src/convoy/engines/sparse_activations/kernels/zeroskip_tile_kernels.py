"""Convolution tile by tile, over all channels or over those that are not zero in the tile, with the pooling that follows."""

from __future__ import annotations

import triton
import triton.language as tl

from convoy.engines.triton.kernels.pooled_kernels import larger
from convoy.engines.triton.kernels.tile_epilogue import activate


@triton.jit
def find_live(
    x, live, counts,
    h, width, c, tiles_h, tiles_w, step_h, step_w, first_h, first_w, patch_h, patch_w, all_live,
    GRANULE: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_X: tl.constexpr, VECTOR_C: tl.constexpr,
):  # fmt: skip
    """live[tile, 0:counts[tile]]: the channels (or, with GRANULE over 1, blocks of so many) that are not zero in a tile's patch.

    A patch is patch_h x patch_w pixels of x, from row tile row · step_h + first_h on; what is outside of x counts as zero. NaN is
    not equal to zero. In ascending order, so sums have one order. With all_live nothing is left out.
    """
    c *= VECTOR_C
    tile = tl.program_id(0)
    top = tile // tiles_w % tiles_h * step_h + first_h
    left = tile % tiles_w * step_w + first_w
    image = tile // tiles_w // tiles_h
    found = 0
    entries = tl.cdiv(c, GRANULE)
    for start in range(0, c, BLOCK_C):
        channel = start + tl.arange(0, BLOCK_C)
        c_inside = channel < c
        alive = tl.zeros((BLOCK_C,), dtype=tl.int32) + all_live
        for pixel in range(0, patch_h * patch_w, BLOCK_X):
            index = pixel + tl.arange(0, BLOCK_X)
            row, column = top + index // patch_w, left + index % patch_w
            inside = (index < patch_h * patch_w) & (row >= 0) & (row < h) & (column >= 0) & (column < width)
            offset = ((image * h + row) * width + column) * c
            values = tl.load(
                x + offset[:, None] + channel[None, :], mask=inside[:, None] & c_inside[None, :], other=0.0
            )
            alive |= tl.max((values != 0.0).to(tl.int32), axis=0)
        alive = tl.where(c_inside, alive, 0)
        if GRANULE > 1:
            alive = tl.max(tl.reshape(alive, (BLOCK_C // GRANULE, GRANULE)), axis=1)
        entry = start // GRANULE + tl.arange(0, BLOCK_C // GRANULE)
        place = found + tl.cumsum(alive, axis=0) - alive
        tl.store(live + tile * entries + place, entry, mask=alive > 0)
        found += tl.sum(alive, axis=0)
    tl.store(counts + tile, found)


@triton.jit
def product(
    x, w, channel, c_inside, pixel_inside, row, column, image, tap, k_index, k_inside, acc, h, width, c, k,
    S: tl.constexpr, DILATION_H: tl.constexpr, DILATION_W: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The sum so far + x[pixels at a tap, channels] · w[tap, channels, filters]."""
    rows, columns = row + tap // S * DILATION_H, column + tap % S * DILATION_W
    inside = pixel_inside & (rows >= 0) & (rows < h) & (columns >= 0) & (columns < width)
    offset = ((image * h + rows) * width + columns) * c
    values = tl.load(x + offset[:, None] + channel[None, :], mask=inside[:, None] & c_inside[None, :], other=0.0)
    place = (tap * c + channel) * k
    weights = tl.load(w + place[:, None] + k_index[None, :], mask=c_inside[:, None] & k_inside[None, :], other=0.0)
    return tl.dot(values, weights, acc, input_precision=PRECISION)


@triton.jit
def pool_windows(
    tile, result_h, result_w, result_inside, first_h, first_w, p, q,
    REGION_W: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, AVERAGE: tl.constexpr, COUNT_PAD: tl.constexpr,
    WINDOW_H: tl.constexpr, WINDOW_W: tl.constexpr, POOL_STRIDE_H: tl.constexpr, POOL_STRIDE_W: tl.constexpr,
    POOL_PAD_H: tl.constexpr, POOL_PAD_W: tl.constexpr,
):  # fmt: skip
    """[BLOCK_R, BLOCK_K]: the windows of a tile of the convolution, which lies in memory from pixel (first_h, first_w) on."""
    column_k = tl.arange(0, BLOCK_K)
    top, left = result_h * POOL_STRIDE_H - POOL_PAD_H, result_w * POOL_STRIDE_W - POOL_PAD_W
    pooled = tl.full((BLOCK_R, BLOCK_K), 0.0 if AVERAGE else float("-inf"), dtype=tl.float32)
    for position in range(WINDOW_H * WINDOW_W):
        seen_h, seen_w = top + position // WINDOW_W, left + position % WINDOW_W
        seen = result_inside & (seen_h >= 0) & (seen_h < p) & (seen_w >= 0) & (seen_w < q)
        at = (seen_h - first_h) * REGION_W + seen_w - first_w
        values = tl.load(
            tile + at[:, None] * BLOCK_K + column_k[None, :],
            mask=seen[:, None],
            other=0.0 if AVERAGE else float("-inf"),
        )
        pooled = pooled + values if AVERAGE else larger(pooled, values)
    if AVERAGE:
        bottom, right = tl.minimum(top + WINDOW_H, p + POOL_PAD_H), tl.minimum(left + WINDOW_W, q + POOL_PAD_W)
        if not COUNT_PAD:
            top, left = tl.maximum(top, 0), tl.maximum(left, 0)
            bottom, right = tl.minimum(bottom, p), tl.minimum(right, q)
        counted = tl.maximum((bottom - top) * (right - left), 1)
        pooled = pooled / counted[:, None].to(tl.float32)
    return pooled


@triton.jit
def conv_pixels(
    index, first_h, first_w,
    POOL: tl.constexpr, RESULT_W: tl.constexpr, REGION_W: tl.constexpr, POOL_STRIDE_H: tl.constexpr,
    POOL_STRIDE_W: tl.constexpr, POOL_PAD_H: tl.constexpr, POOL_PAD_W: tl.constexpr,
):  # fmt: skip
    """Row and column of the convolution's pixels that the results from (first_h, first_w) on need."""
    if POOL == "pairs":
        conv_h = 2 * (first_h + index // 4 // RESULT_W) + index % 4 // 2
        conv_w = 2 * (first_w + index // 4 % RESULT_W) + index % 2
    elif POOL == "windows":
        top, left = first_h * POOL_STRIDE_H - POOL_PAD_H, first_w * POOL_STRIDE_W - POOL_PAD_W
        conv_h, conv_w = top + index // REGION_W, left + index % REGION_W
    else:
        conv_h, conv_w = first_h + index // REGION_W, first_w + index % REGION_W
    return conv_h, conv_w


@triton.jit
def tile_sum(
    x, w, live, counts, tile, dense_from, pixel_inside, row, column, image, k_index, k_inside, h, width, c, k,
    R: tl.constexpr, S: tl.constexpr, DILATION_H: tl.constexpr, DILATION_W: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr, GRANULE: tl.constexpr, PRECISION: tl.constexpr,
    CHUNKED: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """[BLOCK_P, BLOCK_K]: this program's share of the products of a tile, over the channels of its list or over all."""
    count = tl.load(counts + tile)
    live += tile * tl.cdiv(c, GRANULE)
    gathers = False
    blocks = count
    if GRANULE == 1:
        gathers = count < dense_from
        blocks = tl.cdiv(tl.where(gathers, count, c), BLOCK_C)
    share = tl.cdiv(blocks, SPLITS)
    begin = tl.program_id(1) * share
    end = tl.minimum(begin + share, blocks)
    acc = tl.zeros((BLOCK_P, BLOCK_K), dtype=tl.float32)
    if GRANULE == 1:
        if gathers:
            for block in range(begin, end):
                entry = block * BLOCK_C + tl.arange(0, BLOCK_C)
                c_inside = entry < count
                channel = tl.load(live + entry, mask=c_inside, other=0)
                part = tl.zeros((BLOCK_P, BLOCK_K), dtype=tl.float32)
                for tap in range(R * S):
                    part = product(
                        x, w, channel, c_inside, pixel_inside, row, column, image, tap, k_index, k_inside, part,
                        h, width, c, k, S, DILATION_H, DILATION_W, PRECISION,
                    )  # fmt: skip
                acc += part
            end = begin
    if CHUNKED:
        for block in range(begin, end):
            number = block
            if GRANULE > 1:
                number = tl.load(live + block)
            channel = number * BLOCK_C + tl.arange(0, BLOCK_C)
            part = tl.zeros((BLOCK_P, BLOCK_K), dtype=tl.float32)
            for tap in range(R * S):
                part = product(
                    x, w, channel, channel < c, pixel_inside, row, column, image, tap, k_index, k_inside, part,
                    h, width, c, k, S, DILATION_H, DILATION_W, PRECISION,
                )  # fmt: skip
            acc += part
    else:
        for step in range(begin * (R * S), end * (R * S)):
            number = step // (R * S)
            tap = step - number * (R * S)
            if GRANULE > 1:
                number = tl.load(live + number)
            channel = number * BLOCK_C + tl.arange(0, BLOCK_C)
            acc = product(
                x, w, channel, channel < c, pixel_inside, row, column, image, tap, k_index, k_inside, acc,
                h, width, c, k, S, DILATION_H, DILATION_W, PRECISION,
            )  # fmt: skip
    return acc


@triton.jit
def finish_tile(
    acc, y, residual, bias, scratch, program, image, conv_h, conv_w, pixel_inside, k_index, k_inside, first_h, first_w,
    p, q, k, y_h, y_w, tiles_h, tiles_w, tiles_k,
    RESULT_H: tl.constexpr, RESULT_W: tl.constexpr, REGION_W: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr, POOL: tl.constexpr, AVERAGE: tl.constexpr, COUNT_PAD: tl.constexpr, WINDOW_H: tl.constexpr,
    WINDOW_W: tl.constexpr, POOL_STRIDE_H: tl.constexpr, POOL_STRIDE_W: tl.constexpr, POOL_PAD_H: tl.constexpr,
    POOL_PAD_W: tl.constexpr, ACTIVATION: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Store a tile's sums: bare ones of a share, or with bias, residual, activation and pooling."""
    inside = pixel_inside[:, None] & k_inside[None, :]
    pixel = (image * p + conv_h) * q + conv_w
    place = pixel[:, None] * k + k_index[None, :]
    if SPLITS > 1:
        total = tl.num_programs(0) // tiles_k // (tiles_h * tiles_w) * p * q
        tl.store(y + tl.program_id(1) * (total.to(tl.int64) * k) + place, acc, mask=inside)
    else:
        if bias is not None:
            acc += tl.load(bias + k_index, mask=k_inside, other=0.0)[None, :].to(tl.float32)
        if residual is not None:
            acc += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
        acc = activate(acc, ACTIVATION)
        if POOL == "none":
            tl.store(y + place, acc.to(y.dtype.element_ty), mask=inside)
        else:
            result = tl.arange(0, BLOCK_R)
            result_h, result_w = first_h + result // RESULT_W, first_w + result % RESULT_W
            result_inside = (result < RESULT_H * RESULT_W) & (result_h < y_h) & (result_w < y_w)
            if POOL == "pairs":
                windows = tl.reshape(acc, (BLOCK_R, 4, BLOCK_K))
                if AVERAGE:
                    pooled = tl.sum(windows, axis=1) * 0.25
                else:
                    pooled = tl.reduce(windows, 1, larger)
            else:
                mine = scratch + program * (BLOCK_P * BLOCK_K)
                tl.store(mine + tl.arange(0, BLOCK_P)[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :], acc)
                tl.debug_barrier()
                pooled = pool_windows(
                    mine, result_h, result_w, result_inside,
                    first_h * POOL_STRIDE_H - POOL_PAD_H, first_w * POOL_STRIDE_W - POOL_PAD_W, p, q,
                    REGION_W, BLOCK_R, BLOCK_K, AVERAGE, COUNT_PAD, WINDOW_H, WINDOW_W,
                    POOL_STRIDE_H, POOL_STRIDE_W, POOL_PAD_H, POOL_PAD_W,
                )  # fmt: skip
            to = ((image * y_h + result_h) * y_w + result_w)[:, None] * k + k_index[None, :]
            tl.store(y + to, pooled.to(y.dtype.element_ty), mask=result_inside[:, None] & k_inside[None, :])


@triton.jit
def tile_conv(
    x, w, y, residual, bias, live, counts, scratch,
    p, q, h, width, c, k, y_h, y_w, tiles_h, tiles_w, tiles_k, dense_from, pad_h, pad_w,
    R: tl.constexpr, S: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr, DILATION_H: tl.constexpr,
    DILATION_W: tl.constexpr, RESULT_H: tl.constexpr, RESULT_W: tl.constexpr, REGION_W: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr, GRANULE: tl.constexpr,
    POOL: tl.constexpr, AVERAGE: tl.constexpr, COUNT_PAD: tl.constexpr, WINDOW_H: tl.constexpr, WINDOW_W: tl.constexpr,
    POOL_STRIDE_H: tl.constexpr, POOL_STRIDE_W: tl.constexpr, POOL_PAD_H: tl.constexpr, POOL_PAD_W: tl.constexpr,
    VECTOR_C: tl.constexpr, VECTOR_K: tl.constexpr, PRECISION: tl.constexpr, CHUNKED: tl.constexpr,
    ACTIVATION: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """One tile of RESULT_H x RESULT_W results by BLOCK_K filters; w is [r·s, c, k].

    The rows of the product are the BLOCK_P pixels of the convolution that the tile needs. POOL is `none` (they are the
    results), `pairs` (four neighbouring rows are a 2x2 window, reduced in registers) or `windows` (they go to `scratch`, of this
    thread block alone, and every window is read back from there: through the first-level cache). GRANULE is that
    of `find_live`: with 1 the channels of the list are gathered, BLOCK_C at a time, unless they are `dense_from` or
    more; then, and with BLOCK_C, blocks are read as they lie. With CHUNKED the products of one block are summed apart (tensor
    cores cut what they add: docs/kernels/strict-fp32.md). With SPLITS over 1, y is fp32 [splits, pixels, k] and takes bare sums.
    """
    c *= VECTOR_C
    k *= VECTOR_K
    program = tl.program_id(0)
    tile = program // tiles_k
    first_h, first_w = tile // tiles_w % tiles_h * RESULT_H, tile % tiles_w * RESULT_W
    image = tile // tiles_w // tiles_h
    k_index = program % tiles_k * BLOCK_K + tl.arange(0, BLOCK_K)
    k_inside = k_index < k
    conv_h, conv_w = conv_pixels(
        tl.arange(0, BLOCK_P), first_h, first_w,
        POOL, RESULT_W, REGION_W, POOL_STRIDE_H, POOL_STRIDE_W, POOL_PAD_H, POOL_PAD_W,
    )  # fmt: skip
    pixel_inside = (conv_h >= 0) & (conv_h < p) & (conv_w >= 0) & (conv_w < q)
    row, column = conv_h * STRIDE_H - pad_h, conv_w * STRIDE_W - pad_w
    acc = tile_sum(
        x, w, live, counts, tile, dense_from, pixel_inside, row, column, image, k_index, k_inside, h, width, c, k,
        R, S, DILATION_H, DILATION_W, BLOCK_P, BLOCK_K, BLOCK_C, GRANULE, PRECISION, CHUNKED, SPLITS,
    )  # fmt: skip
    finish_tile(
        acc, y, residual, bias, scratch, program, image, conv_h, conv_w, pixel_inside, k_index, k_inside, first_h, first_w,
        p, q, k, y_h, y_w, tiles_h, tiles_w, tiles_k,
        RESULT_H, RESULT_W, REGION_W, BLOCK_P, BLOCK_R, BLOCK_K, POOL, AVERAGE, COUNT_PAD, WINDOW_H, WINDOW_W,
        POOL_STRIDE_H, POOL_STRIDE_W, POOL_PAD_H, POOL_PAD_W, ACTIVATION, SPLITS,
    )  # fmt: skip
