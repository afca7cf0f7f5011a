"""Problems of every kind, so that `convoy doctor` asks each engine about one that suits it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np

from convoy.engines.base import Engine
from convoy.problem import (
    VOLUME_LAYOUTS,
    Conv3dProblem,
    ConvProblem,
    Epilogue,
    LayoutProblem,
    LinearProblem,
    Pool,
    Problem,
    SubgraphProblem,
    TensorSpec,
    WeightMask,
)

_SHAPES = {
    "3x3": ConvProblem(1, 64, 56, 56, 64, 3, 3, 1, 1, epilogue=Epilogue(bias=True)),
    "1x1": ConvProblem(1, 64, 56, 56, 256, 1, 1),
    "depthwise": ConvProblem(1, 64, 56, 56, 64, 3, 3, 1, 1, groups=64),
    "first layer": ConvProblem(1, 3, 224, 224, 64, 7, 7, 3, 3, 2, 2),
}
"""Convolutions of a residual net and of a mobile net."""

_TYPES = (("fp32", "strict"), ("fp32", "as_torch"), ("fp16", "half"))

_SUBGRAPHS = {
    "max pooling": (
        "input %x: fp32[1,64,56,56]\n%y: fp32[1,64,28,28] = aten.max_pool2d.default(%x, (2, 2), (2, 2))\nreturn %y\n"
    ),
    "max pooling and activation": (
        "input %x: fp32[1,64,56,56]\n"
        "%y: fp32[1,64,28,28] = aten.max_pool2d.default(%x, (2, 2), (2, 2))\n"
        "%z: fp32[1,64,28,28] = aten.relu.default(%y)\nreturn %z\n"
    ),
    "backward max pooling": (
        "input %v0: fp32[1,64,28,28]\ninput %v1: fp32[1,64,56,56]\ninput %v2: i64[1,64,28,28]\n"
        "%v4: fp32[1,64,56,56] = aten.max_pool2d_with_indices_backward.default"
        "(%v0, %v1, (2, 2), (2, 2), (0, 0), (1, 1), False, %v2)\nreturn %v4\n"
    ),
    "batch norm of a training step": (
        "input %x: fp32[2,64,28,28]\n"
        + "".join(f"input %p{i}: fp32[64]\n" for i in range(4))
        + "%y: fp32[2,64,28,28], "
        "%s0: fp32[64], %s1: fp32[64], %s2: fp32[64], %s3: fp32[64] = "
        "aten._native_batch_norm_legit_functional.default(%x, %p0, %p1, %p2, %p3, True, 0.1, 1e-05)\n"
        "%z: fp32[2,64,28,28] = aten.relu.default(%y)\nreturn %s0, %s1, %s2, %s3, %z\n"
    ),
    "concatenation": (
        "input %x0: fp32[1,32,28,28]\ninput %x1: fp32[1,32,28,28]\n"
        "%y: fp32[1,64,28,28] = aten.cat.default((%x0, %x1), 1)\nreturn %y\n"
    ),
    "channel scale": (
        "input %x: fp32[1,64,28,28]\ninput %g: fp32[1,64,1,1]\n%y: fp32[1,64,28,28] = aten.mul.Tensor(%x, %g)\nreturn %y\n"
    ),
    "layer norm": (
        "input %x: fp32[1,64,28,28]\nconstant %s: fp32[64]\nconstant %b: fp32[64]\n"
        "%l: fp32[1,28,28,64] = aten.permute.default(%x, (0, 2, 3, 1))\n"
        "%n: fp32[1,28,28,64] = aten.layer_norm.default(%l, (64,), %s, %b, 1e-06, False)\n"
        "%y: fp32[1,64,28,28] = aten.permute.default(%n, (0, 3, 1, 2))\nreturn %y\n"
    ),
    "group norm": (
        "input %x: fp32[1,64,28,28]\nconstant %s: fp32[64]\nconstant %b: fp32[64]\n"
        "%n: fp32[1,64,28,28] = aten.group_norm.default(%x, 8, %s, %b, 1e-05, False)\n"
        "%y: fp32[1,64,28,28] = aten.silu.default(%n)\nreturn %y\n"
    ),
    "squeeze-and-excitation": (
        "input %x: fp32[1,64,28,28]\nconstant %w0: fp32[16,64,1,1]\nconstant %w1: fp32[64,16,1,1]\n"
        "%m: fp32[1,64,1,1] = aten.mean.dim(%x, (2, 3), True)\n"
        "%s: fp32[1,16,1,1] = conv2d(%m, %w0, None, (1, 1), (0, 0), (1, 1), 1)\n"
        "%a: fp32[1,16,1,1] = aten.silu.default(%s)\n"
        "%e: fp32[1,64,1,1] = conv2d(%a, %w1, None, (1, 1), (0, 0), (1, 1), 1)\n"
        "%g: fp32[1,64,1,1] = aten.sigmoid.default(%e)\n"
        "%y: fp32[1,64,28,28] = aten.mul.Tensor(%x, %g)\nreturn %y\n"
    ),
    "convolutions in sequence": (
        "input %x: fp32[1,16,32,32]\nconstant %w0: fp32[32,16,1,1]\nconstant %b0: fp32[32]\n"
        "constant %w1: fp32[32,1,3,3]\nconstant %b1: fp32[32]\n"
        "%y0: fp32[1,32,32,32] = conv2d(%x, %w0, %b0, (1, 1), (0, 0), (1, 1), 1)\n"
        "%a0: fp32[1,32,32,32] = aten.relu.default(%y0)\n"
        "%y1: fp32[1,32,32,32] = conv2d(%a0, %w1, %b1, (1, 1), (1, 1), (1, 1), 32)\n"
        "%a1: fp32[1,32,32,32] = aten.relu.default(%y1)\nreturn %a1\n"
    ),
    "parallel 1x1 convolutions": (
        "input %x: fp16[1,64,28,28]\nconstant %w0: fp16[32,64,1,1]\nconstant %w1: fp16[64,64,1,1]\n"
        "%y0: fp16[1,32,28,28] = conv2d(%x, %w0, None, (1, 1), (0, 0), (1, 1), 1)\n"
        "%y1: fp16[1,64,28,28] = conv2d(%x, %w1, None, (1, 1), (0, 0), (1, 1), 1)\nreturn %y0, %y1\n"
    ),
    "casts of weights": (
        "input %v0: fp32[4,3,3,3]\ninput %v1: fp32[4]\n"
        "%v2: bf16[4,3,3,3] = aten._to_copy.default(%v0, dtype=dtype.bf16)\n"
        "%v3: bf16[4] = aten._to_copy.default(%v1, dtype=dtype.bf16)\nreturn %v2, %v3\n"
    ),
}
"""Regions of a graph that are no single convolution."""


@cache
def sample_problems() -> tuple[Problem, ...]:
    """Problems of every kind: an engine whose parts are all present supports one of them on the device that it is made for."""
    dense = [found for shape in _SHAPES.values() for found in _variants(shape)]
    linear = [LinearProblem(1, 1024, 1024), LinearProblem(1, 1024, 1024, "fp16", "half")]
    subgraphs = [
        SubgraphProblem(f"graph 1\n{text}", layout, label=label)
        for label, text in _SUBGRAPHS.items()
        for layout in ("nchw", "nhwc")
    ]
    return (
        *dense,
        *_pooled(),
        *_odd_channels(),
        *_gradients(),
        *_pruned(),
        *(Conv3dProblem(1, 32, (8, 28, 28), 32, (3, 3, 3), (1, 1, 1), layout=layout) for layout in VOLUME_LAYOUTS),
        *linear,
        LayoutProblem(TensorSpec((1, 64, 56, 56), "fp32"), "nchw", "nhwc"),
        *subgraphs,
    )


def _variants(shape: ConvProblem) -> list[ConvProblem]:
    return [_typed(shape, layout, dtype, numerics) for layout in ("nchw", "nhwc") for dtype, numerics in _TYPES]


def _typed(problem: ConvProblem, layout: str, dtype: str, numerics: str) -> ConvProblem:
    return replace(problem, layout=layout, x_dtype=dtype, weight_dtype=dtype, y_dtype=dtype, numerics=numerics)


def _pooled() -> list[ConvProblem]:
    epilogue = Epilogue(bias=True, activation="relu", pool=Pool("max", 2, 2, 2, 2))
    return _variants(replace(_SHAPES["3x3"], epilogue=epilogue))


def _odd_channels() -> list[ConvProblem]:
    """Channels that are no multiple of 16 bytes; and a batch that an engine may split."""
    return [*_variants(ConvProblem(8, 65, 28, 28, 63, 3, 3, 1, 1)), *_variants(replace(_SHAPES["3x3"], n=32))]


def _gradients() -> list[ConvProblem]:
    """What training steps need besides forward convolutions: gradients, and weights that change from call to call."""
    directions = [
        replace(shape, direction=direction, epilogue=Epilogue(), n=8)
        for shape in _SHAPES.values()
        for direction in ("dgrad", "wgrad")
    ]
    changing = [replace(shape, dynamic_weight=True) for shape in (_SHAPES["3x3"], _SHAPES["1x1"])]
    return [found for shape in (*directions, *changing) for found in _variants(shape)]


def _pruned() -> list[ConvProblem]:
    """A layer whose weights are pruned in each pattern: single weights, two of four, blocks, whole channels."""
    shape = (_SHAPES["3x3"].k, _SHAPES["3x3"].c, _SHAPES["3x3"].r, _SHAPES["3x3"].s)
    k, c, r, s = np.indices(shape)
    patterns = (
        (k + c + r + s) % 10 == 0,
        c % 4 < 2,
        (c // 8 + r + s) % 4 == 0,  # eight channels at a tap, in all filters
        c % 4 == 0,
    )
    masks = [WeightMask(shape, np.packbits(pattern.ravel()).tobytes()) for pattern in patterns]
    return [found.with_mask(mask) for mask in masks for found in _variants(_SHAPES["3x3"])]


def samples_for(engine: Engine) -> tuple[Problem, ...]:
    """The sample problems, and the engine's own."""
    return (*sample_problems(), *engine.samples())
