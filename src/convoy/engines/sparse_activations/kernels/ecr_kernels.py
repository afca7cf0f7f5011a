"""ECR and PECR as their authors describe them (Xu et al., arXiv 1909.09927), for all channels and filters of a layer.

Each sliding window is compressed: its non-zero values with the place of the weights that meet them, and their count, once for
all filters; an empty window is skipped. Then every output is one sparse product; PECR adds bias, ReLU and the pooling to it.
One thread block computes one (pooled) pixel of some filters, or several pixels where filters are few, and reads the lists of
its windows value by value.
"""

from __future__ import annotations

import triton
import triton.language as tl

from convoy.engines.sparse_activations.kernels.zeroskip_tile_kernels import larger
from convoy.engines.triton.kernels.tile_epilogue import activate


@triton.jit
def compress_windows(
    x, values, places, counts,
    windows, p, q, h, width, c, stride_h, stride_w, dilation_h, dilation_w, pad_h, pad_w, all_kept,
    R: tl.constexpr, S: tl.constexpr, WINDOWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """values[window, 0:counts[window]] and places[...]: what is not zero in a window, in the order of (tap, channel).

    A place is tap · c + channel. With all_kept zeros are kept too (weights that are not finite meet them). One thread block
    compresses WINDOWS windows, BLOCK places of each at a time.
    """
    window = tl.program_id(0).to(tl.int64) * WINDOWS + tl.arange(0, WINDOWS)
    there = window < windows
    length = R * S * c
    image = window // (p * q)
    row, column = window // q % p * stride_h - pad_h, window % q * stride_w - pad_w
    found = tl.zeros((WINDOWS,), dtype=tl.int32)
    for start in range(0, length, BLOCK):
        place = start + tl.arange(0, BLOCK)
        tap = place // c
        rows = row[:, None] + (tap // S * dilation_h)[None, :]
        columns = column[:, None] + (tap % S * dilation_w)[None, :]
        inside = (
            there[:, None] & (place < length)[None, :] & (rows >= 0) & (rows < h) & (columns >= 0) & (columns < width)
        )
        at = ((image[:, None] * h + rows) * width + columns) * c + (place - tap * c)[None, :]
        seen = tl.load(x + at, mask=inside, other=0.0)
        kept = inside & ((seen != 0.0) | (all_kept > 0))
        number = kept.to(tl.int32)
        to = window[:, None] * length + found[:, None] + tl.cumsum(number, axis=1) - number
        tl.store(values + to, seen, mask=kept)
        tl.store(places + to, tl.broadcast_to(place[None, :], (WINDOWS, BLOCK)), mask=kept)
        found += tl.sum(number, axis=1)
    tl.store(counts + window, found, mask=there)


@triton.jit
def multiply_windows(
    values, places, counts, w, y, residual, bias,
    results, p, q, k, y_h, y_w, tiles_k, length,
    WINDOW_H: tl.constexpr, WINDOW_W: tl.constexpr, POOL_STRIDE_H: tl.constexpr, POOL_STRIDE_W: tl.constexpr,
    POOL_PAD_H: tl.constexpr, POOL_PAD_W: tl.constexpr, AVERAGE: tl.constexpr, COUNT_PAD: tl.constexpr,
    PIXELS: tl.constexpr, BLOCK_K: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """PIXELS result pixels by BLOCK_K filters; w is [r·s·c, k]. Without pooling the window is 1x1, stride 1."""
    program = tl.program_id(0)
    result = program // tiles_k * PIXELS + tl.arange(0, PIXELS)
    there = result < results
    k_index = program % tiles_k * BLOCK_K + tl.arange(0, BLOCK_K)
    k_inside = k_index < k
    image = result // (y_h * y_w)
    top = result // y_w % y_h * POOL_STRIDE_H - POOL_PAD_H
    left = result % y_w * POOL_STRIDE_W - POOL_PAD_W
    bottom, right = tl.minimum(top + WINDOW_H, p + POOL_PAD_H), tl.minimum(left + WINDOW_W, q + POOL_PAD_W)
    if not COUNT_PAD:
        bottom, right = tl.minimum(bottom, p), tl.minimum(right, q)
        counted = (bottom - tl.maximum(top, 0)) * (right - tl.maximum(left, 0))
    else:
        counted = (bottom - top) * (right - left)
    pooled = tl.full((PIXELS, BLOCK_K), 0.0 if AVERAGE else float("-inf"), dtype=tl.float32)
    for tap in range(WINDOW_H * WINDOW_W):
        row, column = top + tap // WINDOW_W, left + tap % WINDOW_W
        used = there & (row >= 0) & (row < p) & (column >= 0) & (column < q)
        window = ((image * p + row) * q + column).to(tl.int64)
        count = tl.load(counts + window, mask=used, other=0)
        acc = tl.zeros((PIXELS, BLOCK_K), dtype=tl.float32)
        for i in range(tl.max(count, axis=0)):
            more = i < count
            value = tl.load(values + window * length + i, mask=more, other=0.0).to(tl.float32)
            place = tl.load(places + window * length + i, mask=more, other=0)
            met = more[:, None] & k_inside[None, :]
            acc += value[:, None] * tl.load(w + place[:, None] * k + k_index[None, :], mask=met, other=0.0).to(
                tl.float32
            )
        if bias is not None:
            acc += tl.load(bias + k_index, mask=k_inside, other=0.0).to(tl.float32)[None, :]
        if residual is not None:
            at = window[:, None] * k + k_index[None, :]
            acc += tl.load(residual + at, mask=used[:, None] & k_inside[None, :], other=0.0).to(tl.float32)
        acc = activate(acc, ACTIVATION)
        pooled = tl.where(used[:, None], pooled + acc if AVERAGE else larger(pooled, acc), pooled)
    if AVERAGE:
        pooled = pooled / tl.maximum(counted, 1).to(tl.float32)[:, None]
    at = result.to(tl.int64)[:, None] * k + k_index[None, :]
    tl.store(y + at, pooled.to(y.dtype.element_ty), mask=there[:, None] & k_inside[None, :])
