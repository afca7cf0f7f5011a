"""Few rows times a matrix: the weight streams through once, products are plain fp32 multiply-adds."""

from __future__ import annotations

import triton
import triton.language as tl

from convoy.engines.triton.kernels.tile_begin import follow
from convoy.engines.triton.kernels.tile_epilogue import activate


@triton.jit
def gemv(
    x, w, y, residual, bias,
    n, c, k, blocks_split,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr, VECTOR: tl.constexpr, ACTIVATION: tl.constexpr,
    SPLIT: tl.constexpr, WAIT: tl.constexpr, TRIGGER: tl.constexpr,
):  # fmt: skip
    """y[:, BLOCK_K channels] over one share of c. Each thread keeps its own sums, added once at the end.

    With SPLIT, y is fp32 [splits, n, k] and takes the bare sums. c comes as a multiple of VECTOR.
    """
    c *= VECTOR
    follow(WAIT, TRIGGER)
    k_index = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    n_index = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    k_inside = k_index < k
    n_inside = n_index < n
    acc = tl.zeros((BLOCK_N, BLOCK_K, BLOCK_C), dtype=tl.float32)
    first = tl.program_id(1) * blocks_split * BLOCK_C
    last = tl.minimum(first + blocks_split * BLOCK_C, c)
    for c0 in range(first, last, BLOCK_C):
        c_index = c0 + tl.arange(0, BLOCK_C)
        c_inside = c_index < c
        weights = tl.load(
            w + (k_index * c)[:, None] + c_index[None, :], mask=k_inside[:, None] & c_inside[None, :], other=0.0,
            eviction_policy="evict_first",
        )  # fmt: skip
        values = tl.load(
            x + (n_index * c)[:, None] + c_index[None, :], mask=n_inside[:, None] & c_inside[None, :], other=0.0
        )
        acc += weights.to(tl.float32)[None, :, :] * values.to(tl.float32)[:, None, :]
    out = tl.sum(acc, axis=2)
    inside = n_inside[:, None] & k_inside[None, :]
    offset = (n_index * k)[:, None] + k_index[None, :]
    if SPLIT:
        tl.store(y + tl.program_id(1) * n * k + offset, out, mask=inside)
    else:
        if bias is not None:
            out += tl.load(bias + k_index, mask=k_inside, other=0.0)[None, :].to(tl.float32)
        if residual is not None:
            out += tl.load(residual + offset, mask=inside, other=0.0).to(tl.float32)
        tl.store(y + offset, activate(out, ACTIVATION).to(y.dtype.element_ty), mask=inside)
