"""Random problems from a seed, and the smallest one that still shows a fault. Not a test module."""

import os
import random
from dataclasses import replace

import numpy as np

from convoy.errors import InputError
from convoy.problem import Conv3dProblem, ConvProblem, Epilogue, LinearProblem, Pool, WeightMask

SEED = int(os.environ.get("CONVOY_FUZZ_SEED", "20261121"))
CASES = int(os.environ.get("CONVOY_FUZZ_CASES", "1200"))

MOST_FLOPS = 4e6
ACTIVATIONS = ("none", "none", "relu", "relu", "relu6", "silu", "hardswish", "hardsigmoid", "sigmoid", "gelu")


def random_problem(seed, index):
    """Case `index` of a seed: any size, padding, stride, dilation, group, dtype, layout, direction and epilogue."""
    draw = random.Random(f"{seed}:{index}")
    while True:
        kind = draw.random()
        problem = _linear(draw) if kind < 0.08 else _volumes(draw) if kind < 0.16 else _convolution(draw)
        if problem.flops <= MOST_FLOPS:
            return problem


def few(draw, most):
    """A small number, 1 more often than others."""
    return 1 if draw.random() < 0.3 else draw.randint(1, most)


def drawn_epilogue(draw):
    return Epilogue(draw.random() < 0.6, draw.random() < 0.3, draw.choice(ACTIVATIONS))


def drawn_dtype(draw):
    dtype = draw.choice(("fp32", "fp32", "fp32", "fp16", "bf16", "fp64"))
    return dtype, "half" if dtype in ("fp16", "bf16") else draw.choice(("strict", "as_torch"))


def _linear(draw):
    dtype, numerics = drawn_dtype(draw)
    return LinearProblem(draw.randint(0, 9), few(draw, 200), few(draw, 60), dtype, numerics, drawn_epilogue(draw))


def _volumes(draw):
    axes = [drawn_axis(draw) for _ in "dhw"]
    window, pad, stride, dilation = zip(
        *((min(side, 5), pad, stride, step) for side, pad, stride, step in axes), strict=True
    )
    size = tuple(drawn_side(draw, side, *rest) for side, *rest in zip(window, pad, dilation, strict=True))
    groups = draw.choice((1, 1, 1, 2, 3))
    dtype, numerics = drawn_dtype(draw)
    direction = draw.choice(("fprop", "fprop", "dgrad", "wgrad"))
    epilogue = drawn_epilogue(draw) if direction == "fprop" else Epilogue(direction == "wgrad" and draw.random() < 0.5)
    channels, filters, n = groups * few(draw, 6), groups * few(draw, 6), draw.choice((0, 1, 1, 2, 3))
    return Conv3dProblem(
        *(n, channels, size, filters, window, pad, stride, dilation, groups),
        layout=draw.choice(("ncdhw", "ndhwc")), dtype=dtype, numerics=numerics, epilogue=epilogue, direction=direction,
    )  # fmt: skip


def _convolution(draw):
    square = draw.random() < 0.5
    r, pad_h, stride_h, dilation_h = drawn_axis(draw)
    s, pad_w, stride_w, dilation_w = (r, pad_h, stride_h, dilation_h) if square else drawn_axis(draw)
    h, w = (drawn_side(draw, *axis) for axis in ((r, pad_h, dilation_h), (s, pad_w, dilation_w)))
    groups = draw.choice((1, 1, 1, 2, 3, 8))
    per_group = 1 if draw.random() < 0.2 else few(draw, 40 if groups == 1 else 5)
    outputs = few(draw, 24 if groups == 1 else 4)
    dtype, numerics = drawn_dtype(draw)
    direction = draw.choice(("fprop", "fprop", "fprop", "dgrad", "wgrad"))
    epilogue = drawn_epilogue(draw) if direction == "fprop" else Epilogue(direction == "wgrad" and draw.random() < 0.5)
    problem = ConvProblem(
        n=draw.choice((0, 1, 1, 1, 2, 3, 5)), c=groups * per_group, h=h, w=w, k=groups * outputs, r=r, s=s,
        pad_h=pad_h, pad_w=pad_w, stride_h=stride_h, stride_w=stride_w, dilation_h=dilation_h, dilation_w=dilation_w,
        groups=groups, layout=draw.choice(("nchw", "nhwc")), x_dtype=dtype, weight_dtype=dtype, y_dtype=dtype,
        acc_dtype="fp64" if dtype == "fp64" else "fp32", numerics=numerics, epilogue=epilogue, direction=direction,
    )  # fmt: skip
    return with_pool(draw, problem) if direction == "fprop" and draw.random() < 0.25 else problem


def with_pool(draw, problem):
    """With a pooling behind it, where the one that is drawn fits."""
    (window_h, stride_h), (window_w, stride_w) = ((few(draw, 4), few(draw, 4)) for _ in "hw")
    kind = draw.choice(("max", "max", "avg"))
    pads = draw.randint(0, window_h // 2), draw.randint(0, window_w // 2)
    ceil_mode, counted = draw.random() < 0.5, kind == "avg" and draw.random() < 0.5
    pool = Pool(kind, window_h, window_w, stride_h, stride_w, *pads, ceil_mode, counted)
    try:
        return replace(problem, epilogue=replace(problem.epilogue, pool=pool))
    except InputError:
        return problem


def drawn_axis(draw):
    """Filter side, padding (over the filter's half at times), stride (over the filter at times), dilation."""
    side = draw.choice((1, 1, 3, 3, 3, 3, 2, 4, 5, 7, 11))
    padding = draw.choice((0, side // 2, side // 2, draw.randint(0, side + 1)))
    stride = draw.choice((1, 1, 1, 2, 2, 3, 5))
    dilation = draw.choice((1, 1, 1, 1, 2, 3, draw.randint(1, 16)))
    return side, padding, stride, dilation


def drawn_side(draw, side, padding, dilation):
    """An image side that the dilated filter just fits, or a larger one."""
    least = max(1, dilation * (side - 1) + 1 - 2 * padding)
    return least + draw.choice((0, 0, 1, 2, draw.randint(0, 12), draw.randint(0, 40)))


def shrink(problem, fails):
    """The smallest problem found that still fails, by making one field smaller or plainer at a time."""
    while True:
        smaller = next((candidate for candidate in _smaller(problem) if fails(candidate)), None)
        if smaller is None:
            return problem
        problem = smaller


PLAIN = {
    "layout": ("nchw", "ncdhw"),
    "direction": ("fprop",),
    "epilogue": (Epilogue(), Epilogue(bias=True), Epilogue(residual=True), Epilogue(activation="relu")),
}


def _smaller(problem):
    for name in (
        "n",
        "groups",
        "c",
        "k",
        "h",
        "w",
        "r",
        "s",
        "pad_h",
        "pad_w",
        "stride_h",
        "stride_w",
        "dilation_h",
        "dilation_w",
    ):
        value = getattr(problem, name, None)
        least = 0 if name.startswith("pad") else 1
        # Less a whole vector too: many engines take nothing else.
        for less in dict.fromkeys((least, (value or 0) // 2, (value or 0) - 8, (value or 0) - 1)):
            if value is not None and least <= less < value:
                yield from _replaced(problem, name, less)
    for name, plainer in PLAIN.items():
        value = getattr(problem, name, None)
        if value in plainer:
            plainer = plainer[: plainer.index(value)]
        for other in plainer:
            if value is not None and (name != "epilogue" or len(str(other)) < len(str(value)) or not other):
                yield from _replaced(problem, name, other)


def _replaced(problem, name, value):
    mask = getattr(problem, "mask", None)
    try:
        if mask is None:
            yield replace(problem, **{name: value})
        else:
            yield _cut(replace(problem, weight_mask="", mask=None, **{name: value}), mask)
    except (InputError, TypeError, AttributeError, ValueError):
        return


def _cut(problem, mask):
    """A smaller problem with the first places of a larger one's mask; ValueError where its weight is not smaller."""
    shape = problem.weight_spec.shape
    if any(side > whole for side, whole in zip(shape, mask.shape, strict=True)):
        raise ValueError(shape)
    bits = np.unpackbits(np.frombuffer(mask.bits, np.uint8), count=mask.positions).reshape(mask.shape)
    return problem.with_mask(WeightMask(shape, np.packbits(bits[tuple(map(slice, shape))]).tobytes()))
