"""The end of every kernel: the activation, and the second launch that adds the parts of a split reduction."""

from __future__ import annotations

import triton
import triton.language as tl

from convoy.engines.triton.kernels.tile_begin import follow


@triton.jit
def activate(v, ACTIVATION: tl.constexpr):
    """The problem's activation on fp32 values; NaN stays NaN, as in torch."""
    if ACTIVATION == "relu":
        v = tl.maximum(v, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif ACTIVATION == "relu6":
        v = tl.minimum(tl.maximum(v, 0.0, propagate_nan=tl.PropagateNan.ALL), 6.0, propagate_nan=tl.PropagateNan.ALL)
    elif ACTIVATION == "silu":
        v = v / (1.0 + tl.exp(-v))
    elif ACTIVATION == "sigmoid":
        v = 1.0 / (1.0 + tl.exp(-v))
    elif ACTIVATION == "hardsigmoid":
        v = tl.maximum(v + 3.0, 0.0, propagate_nan=tl.PropagateNan.ALL)
        v = tl.minimum(v, 6.0, propagate_nan=tl.PropagateNan.ALL) / 6.0
    elif ACTIVATION == "hardswish":
        u = tl.maximum(v + 3.0, 0.0, propagate_nan=tl.PropagateNan.ALL)
        v = v * tl.minimum(u, 6.0, propagate_nan=tl.PropagateNan.ALL) / 6.0
    elif ACTIVATION == "gelu":
        v = 0.5 * v * (1.0 + tl.erf(v * 0.7071067811865476))
    return v


@triton.jit
def reduce_splits(
    partial,
    y,
    residual,
    bias,
    elements,
    channels,
    pitch,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PITCHED: tl.constexpr,
    WAIT: tl.constexpr,
):
    """y[pixel, channel] = activation(sum over splits of partial[split, pixel, channel] + bias + residual).

    partial is fp32 and dense; the splits are added in ascending order, so equal inputs give equal bits. With WAIT the
    kernel may be launched before the previous kernel has ended (programmatic dependent launch) and waits here. With PITCHED, y's
    pixels lie `pitch` elements apart: it is a slice of the channels of a larger tensor.
    """
    follow(WAIT, False)
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < elements
    total = tl.load(partial + index, mask=inside, other=0.0)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(partial + split * elements.to(tl.int64) + index, mask=inside, other=0.0)
    if bias is not None:
        total += tl.load(bias + index % channels, mask=inside, other=0.0).to(tl.float32)
    if residual is not None:
        total += tl.load(residual + index, mask=inside, other=0.0).to(tl.float32)
    place = index
    if PITCHED:
        place = index // channels * pitch + index % channels
    tl.store(y + place, activate(total, ACTIVATION).to(y.dtype.element_ty), mask=inside)
