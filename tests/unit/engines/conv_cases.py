"""The list of problems that every property of every engine is tested over. Not a test module."""

from dataclasses import replace

from convoy.problem import (
    Conv3dProblem,
    ConvProblem,
    Epilogue,
    LayoutProblem,
    LinearProblem,
    Pool,
    SubgraphProblem,
    TensorSpec,
)

BIAS_RELU = Epilogue(bias=True, activation="relu")

SHAPES = {
    "3x3 padded": ConvProblem(2, 8, 9, 7, 6, 3, 3, 1, 1),
    "3x3 unpadded, even": ConvProblem(1, 16, 8, 8, 12, 3, 3),
    "3x3 over-padded": ConvProblem(2, 2, 3, 3, 2, 3, 3, 2, 2),
    "3x3 padded on one axis": ConvProblem(1, 3, 5, 11, 4, 3, 3, 0, 1),
    "3x3 long reduction": ConvProblem(1, 96, 6, 5, 8, 3, 3, 1, 1),
    "3x3 stride 2": ConvProblem(2, 4, 9, 8, 8, 3, 3, 1, 1, 2, 2),
    "3x3 strides 1 and 3": ConvProblem(1, 4, 7, 13, 4, 3, 3, 1, 1, 1, 3),
    "3x3 filter fills the image": ConvProblem(1, 5, 3, 3, 7, 3, 3),
    "one pixel, one channel": ConvProblem(1, 1, 1, 1, 1, 1, 1),
    "one channel in": ConvProblem(2, 1, 12, 12, 4, 5, 5, 2, 2),
    "one channel out": ConvProblem(2, 5, 6, 7, 1, 3, 3, 1, 1),
    "1x1": ConvProblem(3, 12, 5, 6, 8, 1, 1),
    "1x1 strides 2 and 3": ConvProblem(2, 4, 7, 8, 8, 1, 1, 0, 0, 2, 3),
    "1x1 padded": ConvProblem(2, 4, 5, 6, 8, 1, 1, 1, 2),
    "1x1 grouped": ConvProblem(1, 8, 5, 6, 4, 1, 1, groups=4),
    "stride over filter": ConvProblem(1, 3, 17, 19, 4, 2, 2, 0, 0, 5, 4),
    "11x11 stride 4": ConvProblem(1, 3, 40, 37, 4, 11, 11, 2, 2, 4, 4),
    "1x7": ConvProblem(1, 4, 9, 12, 6, 1, 7, 0, 3),
    "7x1 with stride 2 across": ConvProblem(1, 4, 12, 9, 6, 7, 1, 3, 0, 1, 2),
    "4x2": ConvProblem(2, 3, 11, 10, 5, 4, 2, 1, 0),
    "grouped 5x5": ConvProblem(2, 6, 20, 21, 4, 5, 5, 2, 2, groups=2),
    "groups of eight": ConvProblem(1, 24, 9, 14, 24, 3, 3, 1, 1, groups=3),
    "depthwise": ConvProblem(2, 8, 10, 9, 8, 3, 3, 1, 1, groups=8),
    "depthwise, two filters a channel": ConvProblem(1, 4, 9, 9, 8, 3, 3, 1, 1, 2, 2, groups=4),
    "dilation 2 and 3": ConvProblem(1, 4, 12, 14, 4, 3, 3, 2, 3, 1, 1, 2, 3),
    "dilation 16": ConvProblem(1, 2, 36, 35, 3, 3, 3, 16, 16, 1, 1, 16, 16),
    "dilated, strided, grouped": ConvProblem(2, 4, 15, 13, 6, 3, 2, 3, 1, 2, 1, 2, 3, groups=2),
    "empty batch": ConvProblem(0, 4, 6, 5, 8, 3, 3, 1, 1),
    "empty batch, 1x1": ConvProblem(0, 4, 6, 5, 8, 1, 1),
    "large enough for tiles": ConvProblem(1, 3, 70, 41, 4, 3, 3, 1, 1),
}

VOLUMES = {
    "3x3x3 padded": Conv3dProblem(2, 4, (4, 5, 6), 6, (3, 3, 3), (1, 1, 1)),
    "uneven, strided, dilated, grouped": Conv3dProblem(
        1, 4, (7, 6, 9), 6, (2, 3, 1), (1, 2, 0), (2, 1, 3), (2, 1, 3), 2
    ),
    "depthwise": Conv3dProblem(1, 4, (3, 4, 5), 4, (3, 3, 3), (1, 1, 1), groups=4),
    "one value, one channel": Conv3dProblem(1, 1, (1, 1, 1), 1, (1, 1, 1)),
    "1x1x1": Conv3dProblem(2, 8, (2, 3, 4), 4, (1, 1, 1)),
    "filter fills the volume": Conv3dProblem(1, 3, (2, 3, 3), 5, (2, 3, 3)),
    "empty batch": Conv3dProblem(0, 4, (3, 4, 5), 6, (3, 3, 3), (1, 1, 1)),
}

EPILOGUES = [
    Epilogue(),
    Epilogue(bias=True),
    BIAS_RELU,
    Epilogue(bias=True, residual=True, activation="relu"),
    Epilogue(residual=True),
    *(
        Epilogue(bias=True, activation=name)
        for name in ("relu6", "silu", "hardswish", "hardsigmoid", "sigmoid", "gelu")
    ),
    Epilogue(residual=True, activation="silu"),
]

POOLS = {
    "2x2": Pool("max", 2, 2, 2, 2),
    "3x3 stride 2, padded": Pool("max", 3, 3, 2, 2, 1, 1),
    "3x3 stride 2, ceil": Pool("max", 3, 3, 2, 2, ceil_mode=True),
    "overlapping, uneven": Pool("max", 3, 2, 1, 2, 1, 0),
    "gaps": Pool("max", 2, 1, 3, 2),
    "average": Pool("avg", 2, 2, 2, 2),
    "average with counted padding, ceil": Pool("avg", 3, 3, 2, 2, 1, 1, ceil_mode=True, count_include_pad=True),
    "average without counted padding, ceil": Pool("avg", 3, 3, 2, 2, 1, 1, ceil_mode=True),
    "average of the whole image": Pool("avg", 9, 10, 9, 10),
}
"""Poolings that fit what the shapes of `POOLED` give, 9 x 10 at least."""

POOLED = {
    "3x3": ConvProblem(2, 8, 9, 10, 6, 3, 3, 1, 1),
    "3x3 stride 2, one image": ConvProblem(1, 3, 21, 20, 70, 3, 3, 1, 1, 2, 2),
    "1x1": ConvProblem(2, 20, 10, 11, 4, 1, 1),
    "grouped, dilated": ConvProblem(1, 4, 13, 15, 6, 3, 3, 1, 1, dilation_h=2, dilation_w=2, groups=2),
}


def pooled(shape):
    """A shape of `POOLED` with every pooling, in every layout and dtype; residual and other activations in fp32."""
    for pool in POOLS.values():
        for layout in ("nchw", "nhwc"):
            for dtype in DTYPES:
                yield replace(of_dtype(shape, dtype).with_layout(layout), epilogue=replace(BIAS_RELU, pool=pool))
            for epilogue in (Epilogue(), Epilogue(residual=True, activation="silu")):
                yield replace(of_dtype(shape, "fp32").with_layout(layout), epilogue=replace(epilogue, pool=pool))


DTYPES = ("fp32", "fp16", "bf16", "fp64")


def of_dtype(problem, dtype, numerics=None):
    """The problem on tensors of a dtype, under the strictest numerics that it has."""
    return replace(
        problem,
        x_dtype=dtype,
        weight_dtype=dtype,
        y_dtype=dtype,
        acc_dtype="fp64" if dtype == "fp64" else "fp32",
        numerics=numerics or ("half" if dtype in ("fp16", "bf16") else "strict"),
    )


def variants(problem):
    """A shape in every direction, dtype and layout; fprop with every epilogue in fp32, and some in the other dtypes."""
    for dtype in DTYPES:
        for layout in ("nchw", "nhwc"):
            laid = of_dtype(problem, dtype).with_layout(layout)
            for epilogue in EPILOGUES if dtype == "fp32" else EPILOGUES[:1] + EPILOGUES[2:4]:
                yield replace(laid, epilogue=epilogue)
            yield replace(laid, direction="dgrad")
            yield replace(laid, direction="wgrad")
            yield replace(laid, direction="wgrad", epilogue=Epilogue(bias=True))


def volume_variants(problem):
    """A shape of `VOLUMES` in every direction, dtype and layout, with some epilogues."""
    for dtype in DTYPES:
        numerics = "half" if dtype in ("fp16", "bf16") else "strict"
        for layout in ("ncdhw", "ndhwc"):
            laid = replace(problem, dtype=dtype, numerics=numerics, layout=layout)
            for epilogue in EPILOGUES[:4] + EPILOGUES[5:6] if dtype == "fp32" else EPILOGUES[:1] + EPILOGUES[3:4]:
                yield replace(laid, epilogue=epilogue)
            yield replace(laid, direction="dgrad")
            yield replace(laid, direction="wgrad", epilogue=Epilogue(bias=True))


LINEAR = [
    LinearProblem(n, c, k, dtype, "half" if dtype in ("fp16", "bf16") else "strict", epilogue)
    for n, c, k in ((1, 1, 1), (1, 20, 7), (3, 96, 5), (0, 4, 3))
    for dtype in DTYPES
    for epilogue in EPILOGUES[:5]
]

POOL = SubgraphProblem(
    "graph 1\n"
    "input %x: fp32[2,3,8,8]\n"
    "%y: fp32[2,3,4,4] = aten.max_pool2d.default(%x, (2, 2), (2, 2))\n"
    "%z: fp32[2,3,4,4] = aten.silu.default(%y)\n"
    "return %z\n"
)

CASTS = SubgraphProblem(
    "graph 1\n"
    "input %v0: fp32[4,3,3,3]\ninput %v1: fp32[4]\ninput %v2: fp32[6,4,1,1]\n"
    "%v3: bf16[4,3,3,3] = aten._to_copy.default(%v0, dtype=dtype.bf16)\n"
    "%v4: bf16[4] = aten._to_copy.default(%v1, dtype=dtype.bf16)\n"
    "%v5: bf16[6,4,1,1] = aten._to_copy.default(%v2, dtype=dtype.bf16, device=device.inputs)\n"
    "return %v3, %v4, %v5\n"
)

OTHERS = [
    POOL,
    CASTS,
    CASTS.with_layout("nhwc"),
    POOL.with_layout("nhwc"),
    LayoutProblem(TensorSpec((2, 3, 4, 5), "fp32"), "nchw", "nhwc"),
    LayoutProblem(TensorSpec((2, 3, 4, 5), "fp16"), "nhwc", "nchw"),
    LayoutProblem(TensorSpec((0, 3, 4, 5), "fp32"), "nchw", "nhwc"),
]

ODD = [
    ConvProblem(1, 4, 6, 6, 4, 3, 3, layout="blocked"),
    ConvProblem(1, 4, 6, 6, 4, 3, 3, x_dtype="fp16"),
    ConvProblem(1, 4, 6, 6, 4, 3, 3, y_dtype="bf16", x_dtype="bf16"),
    ConvProblem(1, 4, 6, 6, 4, 3, 3, acc_dtype="fp64"),
    ConvProblem(1, 4, 6, 6, 4, 3, 3, weight_mask="0123456789abcdef"),
    ConvProblem(1, 4, 6, 6, 4, 3, 3, direction="dgrad", epilogue=BIAS_RELU),
    ConvProblem(1, 4, 6, 6, 4, 3, 3, direction="wgrad", epilogue=BIAS_RELU),
    ConvProblem(1, 2048, 512, 512, 2048, 3, 3, 1, 1),
    LayoutProblem(TensorSpec((2, 3, 4, 5), "fp32"), "nchw", "blocked"),
]
"""Problems for which most engines must find a reason; some are too large to be run."""
