"""Random problems by family: a family is what some engines are made for, and few problems drawn freely are. Not a test module.

Free problems (`random_problems`) seldom have whole vectors of channels in NHWC, and never a mask or a piece of the graph: most
engines for GPUs would see none of their own.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from convoy.engines.base import Engine
from convoy.engines.hopper.chains.bottleneck_problem import subgraph_of
from convoy.engines.hopper.chains.bottleneck_tile_config import Bottleneck
from convoy.engines.hopper.chains.inverted_residual_block import InvertedResidual
from convoy.engines.hopper.chains.inverted_residual_problem import inverted_subgraph
from convoy.engines.manifest import MANIFEST, load_engine
from convoy.errors import InputError
from convoy.problem import (
    Conv3dProblem,
    ConvProblem,
    Epilogue,
    LayoutProblem,
    LinearProblem,
    Pool,
    Problem,
    SubgraphProblem,
)
from convoy.target import Target
from tests.fuzz.random_problems import CASES, drawn_axis, drawn_epilogue, drawn_side, few, with_pool
from tests.unit.engines import (
    cpu_gate_cases,
    gated_1x1_cases,
    group_norm_cases,
    norm_cases,
    pool_backward_cases,
    squeeze_excitation_cases,
)
from tests.unit.engines.banded_cases import ACTIVATIONS, Part, piece
from tests.unit.engines.pruned_cases import PATTERNS, mask_of, pattern

LEAST_OWN = 6
"""Of an engine's own problems in a direction: with fewer, the families no longer know what it is for."""

TRIES = max(60, CASES // 20)
"""Of each family."""

MOST_FLOPS = 1e7
MOST_ELEMENTS = 1 << 18
"""Of a tensor: a pointwise layer's operations are few beside its pixels."""

HALVES = (("fp16", "half"), ("bf16", "half"))
TYPES = (*HALVES, ("fp32", "as_torch"), ("fp32", "strict"))
"""Dtypes with numerics."""

CLAIMS = {
    "aten": ("fprop", "dgrad", "wgrad", "piece"),
    "reference": ("fprop", "dgrad", "wgrad", "piece"),
    "inductor": ("piece",),
    "inductor.whole": ("piece",),
    "cudnn": ("fprop", "dgrad", "wgrad"),
    "foreach": ("piece",),
    "gemm": ("fprop", "dgrad", "wgrad"),
    "pointwise": ("fprop", "dgrad"),
    "triton.pooling": ("piece",),
    "triton.pool_backward": ("piece",),
    "triton.batch_norm": ("piece",),
    "triton.group_norm": ("piece",),
    "cuda.squeeze_excitation": ("piece",),
    "cuda.gated_1x1": ("piece",),
    "triton.merged": ("piece",),
    "cuda.bottleneck": ("piece",),
    "cuda.inverted_residual": ("piece",),
    "cuda.expand_depthwise": ("piece",),
    "cuda.fusion": ("piece",),
    "cuda.layout": (),
    "triton.dgrad": ("dgrad",),
    "triton.wgrad": ("wgrad",),
    "cuda.dgrad": ("dgrad",),
    "cuda.wgrad": ("wgrad",),
    "triton.stem_wgrad": ("wgrad",),
    "triton.depthwise_gradients": ("dgrad", "wgrad"),
    "batches": ("fprop", "dgrad"),
    **dict.fromkeys((name for name in MANIFEST if "cuda" not in load_engine(name).devices), ()),
}
"""Engine → the directions in which it has problems of some family on a Hopper GPU; all others have `fprop` alone."""

ASKED_ON_DEVICE = {"cudnn": "only cuDNN knows for what it has plans, and it wants the device to say so"}
"""Engines that say nothing of a GPU that is not there, with the reason: their cases are counted where there is one."""


def claims(engine: str) -> tuple[str, ...]:
    """See `CLAIMS`."""
    return CLAIMS.get(engine, ("fprop",))


def direction_of(problem: Problem) -> str:
    """`fprop`, `dgrad`, `wgrad`, or `piece` for a piece of the graph."""
    if isinstance(problem, (ConvProblem, Conv3dProblem)):
        return problem.direction
    return "fprop" if isinstance(problem, LinearProblem) else "piece"


def _typed(draw: random.Random, types: Sequence[tuple[str, str]] = TYPES) -> dict[str, str]:
    dtype, numerics = draw.choice(types)
    return dict.fromkeys(("x_dtype", "weight_dtype", "y_dtype"), dtype) | {"numerics": numerics}


def _axis(draw: random.Random) -> tuple[int, int, int, int]:
    """Filter side, padding, stride, dilation: mostly such as layers have."""
    if draw.random() < 0.3:
        return drawn_axis(draw)
    side = draw.choice((1, 3, 3, 3, 5, 7))
    padding = draw.choice((side // 2, side // 2, 0, draw.randint(0, side)))
    return side, padding, draw.choice((1, 1, 1, 2, 2, 3)), draw.choice((1, 1, 1, 1, 2))


def _conv(draw: random.Random, c: int, k: int, axes: Sequence[tuple[int, ...]] = (), **rest: object) -> ConvProblem:
    """A convolution of these channels; axes, sizes, dtype and epilogue are drawn where they are not given."""
    if not axes:
        axis = _axis(draw)
        axes = (axis, axis if draw.random() < 0.6 else _axis(draw))
    (r, pad_h, stride_h, dilation_h), (s, pad_w, stride_w, dilation_w) = axes
    h, w = drawn_side(draw, r, pad_h, dilation_h), drawn_side(draw, s, pad_w, dilation_w)
    if draw.random() < 0.7:  # some engines want whole strides
        h, w = -(-h // stride_h) * stride_h, -(-w // stride_w) * stride_w
    direction = rest.get("direction", "fprop")
    epilogue = drawn_epilogue(draw) if direction == "fprop" else Epilogue(direction == "wgrad" and draw.random() < 0.3)
    fields: dict[str, object] = {"layout": "nhwc", "epilogue": epilogue, **_typed(draw)}
    sizes = (draw.choice((1, 1, 2, 3, 4, 8)), c, h, w, k, r, s, pad_h, pad_w)
    return ConvProblem(*sizes, stride_h, stride_w, dilation_h, dilation_w, **(fields | rest))


def _vectors(draw: random.Random, most: int = 18) -> int:
    """Channels in whole vectors of every dtype; half of them in whole pairs of vectors too."""
    return draw.choice((8, 16)) * few(draw, most // 2)


def _products(direction: str, *types: tuple[str, str]) -> Callable[[random.Random], Problem]:
    """Dense NHWC convolutions for tensor cores."""
    return lambda draw: _conv(draw, _vectors(draw), _vectors(draw), direction=direction, **_typed(draw, types or TYPES))


def _fresh(draw: random.Random) -> Problem:
    """Dense NHWC convolutions whose weight changes from call to call, half precision more often."""
    return _conv(draw, _vectors(draw), _vectors(draw), dynamic_weight=True, **_typed(draw, (*HALVES, *TYPES)))


def _three_by_three(draw: random.Random) -> Problem:
    """3x3 filters of stride 1, in either memory format."""
    axis = (3, draw.choice((1, 1, 0, 2)), 1, 1)
    return _conv(draw, few(draw, 70), few(draw, 70), (axis, axis), layout=draw.choice(("nchw", "nhwc")))


def _first_layers(direction: str) -> Callable[[random.Random], Problem]:
    """Images of few channels, larger filters and strides."""

    def family(draw: random.Random) -> Problem:
        side, stride = draw.choice((3, 3, 5, 7, 7, 11)), draw.choice((1, 2, 2, 3, 4))
        axis = (side, draw.choice((0, side // 2, draw.randint(0, side))), stride, 1)
        c = draw.choice((1, 2, 3, 3, 3, 4))
        return _conv(draw, c, _vectors(draw, 12), (axis, axis), direction=direction)

    return family


def _groups(draw: random.Random) -> Problem:
    """Groups of several channels and filters, as many or not."""
    groups, channels = draw.randint(2, 5), draw.choice((1, 2, 3, 4, 8, 8, 12, 16, 24, 32))
    filters = draw.choice((channels, channels, 4 * draw.randint(1, 8)))
    return _conv(draw, groups * channels, groups * filters, groups=groups)


def _first_layers_tf32(draw: random.Random) -> Problem:
    """Images of few channels as PyTorch would multiply them in fp32."""
    axis = (draw.choice((3, 5, 7, 11)), draw.randint(0, 3), draw.choice((1, 2, 2, 4)), 1)
    return _conv(draw, draw.randint(1, 4), _vectors(draw, 6), (axis, axis), **_typed(draw, TYPES[2:3]))


def _depthwise_halves(draw: random.Random) -> Problem:
    """A filter for each channel, whole vectors of halves."""
    c, side, stride = 8 * few(draw, 20), draw.choice((3, 3, 5, 5, 2)), draw.choice((1, 1, 2, 3))
    axis = (side, draw.choice((side // 2, side // 2, 0, side)), stride, 1)
    return _conv(draw, c, c, (axis, axis), groups=c, **_typed(draw, HALVES))


def _depthwise(direction: str) -> Callable[[random.Random], Problem]:
    """A filter for each channel."""

    def family(draw: random.Random) -> Problem:
        c = 4 * (1 + few(draw, 24)) if draw.random() < 0.75 else draw.randint(2, 70)
        side, stride = draw.choice((3, 3, 3, 5, 7)), draw.choice((1, 1, 2, 3))
        axis = (side, draw.choice((side // 2, side // 2, 0, side)), stride, draw.choice((1, 1, 1, 1, 2)))
        epilogue = {} if direction == "fprop" else {"epilogue": Epilogue()}
        return _conv(draw, c, c, (axis, axis), direction=direction, groups=c, **epilogue)

    return family


def _rows(draw: random.Random) -> Problem:
    """Matrices: linear layers, 1x1 convolutions, those of one pixel."""
    c, k = _vectors(draw, 64), _vectors(draw, 64)
    if draw.random() < 0.4:
        dtype, numerics = draw.choice(TYPES)
        return LinearProblem(draw.randint(1, 40), c, k, dtype, numerics, drawn_epilogue(draw))
    problem = _conv(draw, c, k, ((1, 0, 1, 1),) * 2)
    return replace(problem, n=draw.randint(1, 10), h=1, w=1) if draw.random() < 0.3 else problem


def _rows_gradients(draw: random.Random) -> Problem:
    """Data gradients of 1x1 convolutions of several images."""
    typed = _typed(draw, TYPES[:3])
    problem = _conv(draw, _vectors(draw, 64), _vectors(draw, 64), ((1, 0, 1, 1),) * 2, direction="dgrad", **typed)
    return replace(problem, n=draw.randint(2, 6))


def _odd_channels(draw: random.Random) -> Problem:
    """Dense NHWC convolutions whose channels are no whole vectors."""
    return _conv(draw, draw.randint(5, 70), draw.randint(1, 70))


def _volumes(draw: random.Random) -> Problem:
    """Dense three-dimensional convolutions in ndhwc, with whole vectors of channels more often."""
    whole = draw.random() < 0.7
    c, k = (_vectors(draw, 8) if whole else draw.randint(1, 40) for _ in "ck")
    axes = [_axis(draw) for _ in "dhw"] if draw.random() < 0.4 else [_axis(draw)] * 3
    window, pad, stride, dilation = zip(
        *((min(side, 5), pad, stride, step) for side, pad, stride, step in axes), strict=True
    )
    sides = [drawn_side(draw, side, *rest) for side, *rest in zip(window, pad, dilation, strict=True)]
    size = tuple(-(-side // step) * step if whole else side for side, step in zip(sides, stride, strict=True))
    dtype, numerics = draw.choice(TYPES)
    return Conv3dProblem(
        *(draw.choice((1, 1, 2, 3)), c, size, k, window, pad, stride, dilation),
        layout="ndhwc", dtype=dtype, numerics=numerics, epilogue=drawn_epilogue(draw),
    )  # fmt: skip


def _pooled(draw: random.Random) -> Problem:
    """Convolutions with a pooling behind them."""
    while True:
        problem = with_pool(draw, _conv(draw, _vectors(draw), _vectors(draw)))
        if problem.epilogue.pool is not None:
            return problem


def _pattern(draw: random.Random, shape: tuple[int, ...]) -> np.ndarray:
    return pattern(draw.choice(PATTERNS), shape, draw.randrange(1 << 16))


def _pruned(draw: random.Random) -> Problem:
    """Weights with zeros anywhere, in NCHW."""
    groups = draw.choice((1, 1, 1, 2, 5))
    c, k = groups * few(draw, 20 // groups), groups * few(draw, 24 // groups)
    types = (("fp32", "as_torch"), ("fp32", "strict"), ("fp16", "half"))
    problem = _conv(draw, c, k, layout="nchw", groups=groups, **_typed(draw, types))
    return problem.with_mask(mask_of(_pattern(draw, problem.weight_spec.shape)))


def _pruned_pairs(draw: random.Random) -> Problem:
    """At most two values in every four channels, in NHWC and half precision."""
    problem = _conv(draw, _vectors(draw), _vectors(draw), **_typed(draw, HALVES))
    k, c, r, s = problem.weight_spec.shape
    places = np.random.default_rng(draw.randrange(1 << 16)).random((k, c // 4, 4, r, s))
    kept = (places.argsort(2).argsort(2) < 2).reshape(k, c, r, s)
    return problem.with_mask(mask_of(kept & _pattern(draw, kept.shape)))


def _pruned_parts(draw: random.Random) -> Problem:
    """Whole filters and channels of zeros, or pieces of eight channels at a tap; NHWC, half precision more often."""
    problem = _conv(draw, 8 + _vectors(draw), _vectors(draw), **_typed(draw, (*HALVES, *TYPES)))
    k, c, r, s = problem.weight_spec.shape
    rng, share = np.random.default_rng(draw.randrange(1 << 16)), draw.uniform(0.1, 0.7)
    if draw.random() < 0.5:
        kept = np.ones((k, c, r, s), bool) & (rng.random((1, c // 8, 1, 1)) < share).repeat(8, 1)
        kept[rng.random(k) < 0.3] = False
    else:
        kept = (rng.random((-(-k // 64), c // 8, r, s)) < share).repeat(8, 1).repeat(64, 0)[:k]
    return problem.with_mask(mask_of(kept))


def _image(draw: random.Random, most: int = 14) -> tuple[int, int, int, int]:
    """n, c, h, w of a piece; channels of any number, whole vectors more often."""
    c = 8 * few(draw, 20) if draw.random() < 0.7 else draw.randint(1, 140)
    return draw.randint(1, 4), c, draw.randint(1, most), draw.randint(2, most)


def _piece(cases: dict[str, tuple], case: tuple, make: Callable[[str], SubgraphProblem]) -> SubgraphProblem:
    """The piece that a builder of other tests makes of one more case."""
    cases["drawn"] = case
    try:
        return make("drawn")
    finally:
        del cases["drawn"]


def _batch_norms(make: Callable[..., SubgraphProblem], option: str) -> Callable[[random.Random], Problem]:
    """Batch norms of a training step with what stands beside them; `option` is the builder's, given half of the time."""

    def family(draw: random.Random) -> Problem:
        beside = draw.choice(("", "relu", "relu", "add", "add relu", "part relu"))
        case = (*_image(draw), draw.choice(("fp32", "fp16", "bf16")), beside)
        given = {option: draw.random() < 0.5}
        return _piece(norm_cases.CASES, case, lambda name: make(name, **given))

    return family


def _window(draw: random.Random, h: int, w: int) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int], bool]:
    """A pooling's window, stride, padding and ceil mode that fit an image."""
    while True:
        window = (draw.randint(1, 4), draw.randint(1, 4)) if draw.random() < 0.3 else (draw.choice((2, 3, 3)),) * 2
        stride = (draw.randint(1, 3),) * 2 if draw.random() < 0.8 else (draw.randint(1, 4), draw.randint(1, 4))
        pad = tuple(draw.choice((0, side // 2)) for side in window)
        ceil_mode = draw.random() < 0.3
        fits = h + 2 * pad[0] >= window[0] and w + 2 * pad[1] >= window[1]
        if fits:
            return window, stride, (pad[0], pad[1]), ceil_mode


def _poolings(draw: random.Random) -> Problem:
    """A pooling by itself, at times the mean of the whole image."""
    n, c, h, w = _image(draw)
    if draw.random() < 0.15:
        dtype, kept = draw.choice(("fp32", "bf16")), draw.random() < 0.5
        made = f"{dtype}[{n},{c}{',1,1' if kept else ''}]"
        text = f"graph 1\ninput %v0: {dtype}[{n},{c},{h},{w}]\n%v1: {made} = aten.mean.dim(%v0, (2, 3), {kept})\nreturn %v1\n"
        return SubgraphProblem(text, "nhwc")
    window, stride, pad, ceil_mode = _window(draw, h, w)
    kind, dtype = draw.choice(("max", "avg")), draw.choice(("fp32", "fp16", "bf16"))
    p, q = Pool(kind, *window, *stride, *pad, ceil_mode).size(h, w)
    more = f"(1, 1), {ceil_mode}" if kind == "max" else f"{ceil_mode}, {draw.random() < 0.5}"
    return SubgraphProblem(
        f"graph 1\ninput %v0: {dtype}[{n},{c},{h},{w}]\n%v1: {dtype}[{n},{c},{p},{q}] = "
        f"aten.{kind}_pool2d.default(%v0, {window}, {stride}, {pad}, {more})\nreturn %v1\n",
        "nhwc",
    )


def _pooling_gradients(draw: random.Random) -> Problem:
    """Backward poolings, by indices or of averages."""
    n, c, h, w = _image(draw, 12)
    window, stride, pad, ceil_mode = _window(draw, h, w)
    dtype = draw.choice(("fp32", "fp16", "bf16"))
    sizes = (n, c, h, w, window, stride, pad, ceil_mode)
    if draw.random() < 0.6:
        indices = draw.choice(("i64", "i64", "i16"))
        make = pool_backward_cases.piece
        return _piece(pool_backward_cases.CASES, (*sizes, dtype), lambda name: make(name, indices=indices))
    case = (*sizes, draw.random() < 0.5, draw.choice((None, None, 3)))
    make = pool_backward_cases.average_piece
    return _piece(pool_backward_cases.AVERAGES, case, lambda name: make(name, dtype))


def merge(
    n: int, c: int, side: int, filters: Sequence[int], behind: str, dtype: str = "fp16", *, biased: bool = True
) -> SubgraphProblem:
    """Parallel 1x1 convolutions, with the same activation or none behind each."""
    lines, results = ["graph 1", f"input %v0: {dtype}[{n},{c},{side},{side}]"], []
    for i, k in enumerate(filters):
        lines.append(f"constant %w{i}: {dtype}[{k},{c},1,1]")
        lines += [f"constant %b{i}: {dtype}[{k}]"] if biased else []
    for i, k in enumerate(filters):
        image, bias = f"{dtype}[{n},{k},{side},{side}]", f"%b{i}" if biased else "None"
        lines.append(f"%y{i}: {image} = conv2d(%v0, %w{i}, {bias}, (1, 1), (0, 0), (1, 1), 1)")
        results.append(f"%y{i}")
        if behind:
            lines.append(f"%z{i}: {image} = aten.{behind}.default(%y{i})")
            results[-1] = f"%z{i}"
    return SubgraphProblem("\n".join([*lines, "return " + ", ".join(results)]) + "\n", "nhwc")


def _parallel(draw: random.Random) -> Problem:
    filters = [_vectors(draw) for _ in range(draw.randint(2, 4))]
    behind, dtype = draw.choice(("", "relu", "silu")), draw.choice(("fp16", "bf16"))
    return merge(
        draw.randint(1, 3), _vectors(draw, 30), draw.randint(1, 12), filters, behind, dtype, biased=draw.random() < 0.7
    )


def _bottlenecks(draw: random.Random) -> Problem:
    c, mid, k = (64 * draw.choice((1, 1, 1, 2, 3)) for _ in range(3))
    residual = draw.choice(("x", "other", "none") if c == k else ("other", "none"))
    first, second, last = (draw.choice(("relu", "relu", "silu", "none")) for _ in range(3))
    sizes = draw.randint(1, 3), draw.randint(1, 12), draw.randint(1, 16), c, mid, k
    block = Bottleneck(*sizes, draw.choice(("fp16", "bf16")), (first, second, last), residual)
    return subgraph_of(block, biased=draw.random() < 0.8)


def _inverted_residuals(draw: random.Random) -> Problem:
    return _inverted(draw, projects=True)


def _expanded(draw: random.Random) -> Problem:
    return _inverted(draw, projects=False)


def _inverted(draw: random.Random, *, projects: bool) -> Problem:
    c, mid, k = (8 * draw.choice((1, 2, 2, 3, 4, most)) for most in (9, 20, 9))
    stride, taps = draw.choice((1, 1, 2)), draw.choice((3, 3, 5))
    words = "relu6", "relu", "silu", "hardswish", "none", "hardsigmoid"
    residual = projects and stride == 1 and draw.random() < 0.5
    filters = (c if residual else k) if projects else mid
    block = InvertedResidual(
        draw.randint(1, 3), draw.randint(1, 20), draw.randint(1, 24), c, mid, filters, taps, stride,
        draw.choice(("fp16", "bf16")), (draw.choice(words), draw.choice(words)), residual, projects,
    )  # fmt: skip
    return inverted_subgraph(block, biased=draw.random() < 0.8)


def _concatenations(draw: random.Random) -> Problem:
    """Two to five values along channels, at times one of them twice."""
    n, _, h, w = _image(draw)
    dtype, count = draw.choice(("fp32", "fp16", "bf16")), draw.randint(2, 5)
    channels = [draw.randint(1, 70) for _ in range(count)]
    order = [*range(count), *draw.choices(range(count), k=draw.random() < 0.2)]
    draw.shuffle(order)
    lines = ["graph 1", *(f"input %v{i}: {dtype}[{n},{c},{h},{w}]" for i, c in enumerate(channels))]
    named, whole = ", ".join(f"%v{i}" for i in order), sum(channels[i] for i in order)
    lines.append(f"%y: {dtype}[{n},{whole},{h},{w}] = aten.cat.default(({named}), 1)")
    return SubgraphProblem("\n".join([*lines, "return %y"]) + "\n", draw.choice(("nhwc", "nhwc", "nchw")))


def _scaled(draw: random.Random) -> Problem:
    """Channels scaled: of one value or several by constants, with an activation or without; of one by a gate for each image."""
    n, _, h, w = _image(draw)
    count, dtype = draw.randint(1, 5), draw.choice(("fp32", "fp32", "fp16"))
    channels = [draw.choice((draw.randint(1, 90), 32 * draw.randint(1, 4))) for _ in range(count)]
    if draw.random() < 0.3:
        made, gate = f"{dtype}[{n},{channels[0]},{h},{w}]", f"{dtype}[{n},{channels[0]},1,1]"
        order = draw.choice(("%x, %g", "%g, %x"))
        lines = [f"input %x: {made}", f"input %g: {gate}", f"%y: {made} = aten.mul.Tensor({order})"]
        return SubgraphProblem(
            "\n".join(["graph 1", *lines, "return %y"]) + "\n", draw.choice(("nhwc", "nhwc", "nchw"))
        )
    lines = ["graph 1", *(f"input %v{i}: {dtype}[{n},{c},{h},{w}]" for i, c in enumerate(channels))]
    lines += [f"constant %c{i}: {dtype}[1,{sum(channels)},1,1]" for i in range(2)]
    made, value = f"{dtype}[{n},{sum(channels)},{h},{w}]", "%v0"
    if count > 1 or draw.random() < 0.2:
        order = ", ".join(f"%v{i}" for i in draw.sample(range(count), count)) + ("," if count == 1 else "")
        lines.append(f"%x: {made} = aten.cat.default(({order}), 1)")
        value = "%x"
    lines.append(f"%y: {made} = aten.addcmul.default(%c0, {value}, %c1)")
    activation = draw.choice(("", "aten.relu.default(%y)", "aten.hardtanh.default(%y, 0, 6)", "aten.silu.default(%y)"))
    if activation:
        lines.append(f"%z: {made} = {activation}")
    returned = "%z" if activation else "%y"
    return SubgraphProblem("\n".join([*lines, f"return {returned}"]) + "\n", draw.choice(("nhwc", "nhwc", "nchw")))


def _group_norms(draw: random.Random) -> Problem:
    """Group norms of images, with an activation behind them at times."""
    n, c, h, w = _image(draw)
    groups = draw.choice([count for count in range(1, c + 1) if c % count == 0])
    dtype = draw.choice(("fp32", "fp32", "fp16", "bf16"))
    case = (n, c, groups, h, w, dtype, draw.choice(("", "relu", "silu", "silu")), draw.random() < 0.8)
    return _piece(group_norm_cases.CASES, case, group_norm_cases.piece)


def _squeeze_excitations(draw: random.Random) -> Problem:
    """Squeeze-and-excitation blocks of images, with a residual or a ReLU behind them at times."""
    n, c, h, w = _image(draw)
    dtype, hidden = draw.choice(("fp32", "fp32", "fp16", "bf16")), draw.choice((1, 4, 7, 16, 40, 100))
    inner, outer = (
        draw.choice(("relu", "silu", "hardswish", "none")),
        draw.choice(("sigmoid", "sigmoid", "hardsigmoid")),
    )
    biases = (draw.random() < 0.8, draw.random() < 0.8)
    case = (n, c, hidden, h, w, dtype, inner, outer, biases, draw.choice(("", "", "add", "relu", "add relu")))
    return _piece(squeeze_excitation_cases.CASES, case, squeeze_excitation_cases.block)


def _gated_1x1s(draw: random.Random) -> Problem:
    """Squeeze-and-excitation blocks with a 1x1 convolution behind them, of half values."""
    n, c, h, w = _image(draw)
    dtype, hidden = draw.choice(("fp16", "bf16")), draw.choice((1, 4, 7, 16))
    inner, outer = (
        draw.choice(("relu", "silu", "hardswish", "none")),
        draw.choice(("sigmoid", "sigmoid", "hardsigmoid")),
    )
    biases = (draw.random() < 0.8, draw.random() < 0.8)
    filters, behind = draw.choice((8, 16, 24, 40, 72, 7)), draw.choice(("", "", "add", "relu", "add relu"))
    case = ((n, c, hidden, h, w, dtype, inner, outer, biases), filters, draw.random() < 0.8, behind)
    return _piece(gated_1x1_cases.CASES, case, gated_1x1_cases.piece)


def _layer_norms(draw: random.Random) -> Problem:
    """Layer norms over the channels of images, at times of tokens."""
    n, c, h, w = _image(draw)
    dtype, affine = draw.choice(("fp32", "fp32", "fp32", "fp16")), draw.random() < 0.7
    lines = [f"constant %{name}: {dtype}[{c}]" for name in ("s", "b") if affine]
    factors = "%s, %b" if affine else "None, None"
    if draw.random() < 0.3:
        spec = f"{dtype}[{n},{h * w},{c}]"
        lines = [
            f"input %x: {spec}",
            *lines,
            f"%y: {spec} = aten.layer_norm.default(%x, ({c},), {factors}, 1e-05, False)",
        ]
        return SubgraphProblem("\n".join(["graph 1", *lines, "return %y"]) + "\n", "any")
    first, last = f"{dtype}[{n},{c},{h},{w}]", f"{dtype}[{n},{h},{w},{c}]"
    lines = [f"input %x: {first}", *lines, f"%l: {last} = aten.permute.default(%x, (0, 2, 3, 1))"]
    lines.append(f"%n: {last} = aten.layer_norm.default(%l, ({c},), {factors}, 1e-06, False)")
    lines.append(f"%y: {first} = aten.permute.default(%n, (0, 3, 1, 2))")
    return SubgraphProblem("\n".join(["graph 1", *lines, "return %y"]) + "\n", draw.choice(("nhwc", "nchw")))


def _in_bands(draw: random.Random) -> Problem:
    """Convolutions one after the other, one of them with a filter a channel."""
    n, c, h, w = draw.randint(0, 3), draw.choice((draw.randint(1, 9), 16)), draw.randint(1, 24), draw.randint(1, 24)
    activations = ("none", *ACTIVATIONS)

    def part(k: int, side: int, stride: int) -> Part:
        pad, dilation = draw.randint(0, side), draw.choice((1, 1, 2))
        return Part(k, side, stride, pad, dilation, draw.choice(activations), draw.random() < 0.8)

    wide = part(draw.randint(1, 70), draw.choice((1, 1, 3)), draw.choice((1, 1, 2)))
    middle = part(0, draw.choice((3, 3, 5)), draw.choice((1, 2)))
    narrow = part(draw.randint(1, 40), 1, 1)
    parts = draw.choice(([wide, middle, narrow], [middle, narrow], [wide, middle]))
    try:
        return piece((n, c, h, w), parts, residual=draw.random() < 0.4)
    except InputError:  # a filter that is larger than its image
        return _in_bands(draw)


def _gated_on_cpus(draw: random.Random) -> Problem:
    """Values times a gate and the 1x1 convolution that reads them."""
    n, c, h, w = _image(draw)
    options = {
        "dtype": draw.choice(("fp32", "fp32", "bf16")),
        "bias": draw.random() < 0.8,
        "residual": draw.random() < 0.4,
        "activation": draw.choice(("none", *ACTIVATIONS)),
        "order": draw.choice(("%x, %g", "%g, %x")),
    }
    return cpu_gate_cases.gated((draw.choice((0, n, n, n)), c, h, w), draw.randint(1, 100), **options)


def _averaged(draw: random.Random) -> Problem:
    """Convolutions with a filter a channel, and the mean of their results."""
    n, c, h, w = _image(draw)
    side = draw.choice((3, 3, 5, 7, 2))
    pad, stride, dilation = (
        draw.choice((side // 2, draw.randint(0, side))),
        draw.choice((1, 1, 2)),
        draw.choice((1, 1, 2)),
    )
    part = Part(0, side, stride, pad, dilation, draw.choice(("none", *ACTIVATIONS)), draw.random() < 0.8)
    dtype, mean = draw.choice(("fp32", "fp32", "bf16")), draw.choice((*cpu_gate_cases.MEANS,))
    try:
        return cpu_gate_cases.averaged((draw.choice((0, n, n, n)), max(2, c), h, w), part, mean, dtype=dtype)
    except InputError:  # a filter that is larger than its image
        return _averaged(draw)


def _casts(draw: random.Random) -> Problem:
    """Several changes of dtype."""
    source, made = draw.sample(("fp32", "fp16", "bf16"), 2)
    shapes = [",".join(str(draw.randint(1, 9)) for _ in range(draw.randint(1, 4))) for _ in range(draw.randint(2, 6))]
    lines = ["graph 1", *(f"input %v{i}: {source}[{shape}]" for i, shape in enumerate(shapes))]
    for i, shape in enumerate(shapes):
        lines.append(f"%w{i}: {made}[{shape}] = aten._to_copy.default(%v{i}, dtype=dtype.{made})")
    return SubgraphProblem(
        "\n".join([*lines, "return " + ", ".join(f"%w{i}" for i in range(len(shapes)))]) + "\n", "nhwc"
    )


FAMILIES: dict[str, Callable[[random.Random], Problem]] = {
    "products": _products("fprop"),
    "products' data gradients": _products("dgrad", *TYPES[:3]),
    "products' weight gradients": _products("wgrad", *TYPES[:3]),
    "products of fresh weights": _fresh,
    "3x3": _three_by_three,
    "first layers": _first_layers("fprop"),
    "first layers' weight gradients": _first_layers("wgrad"),
    "first layers in tf32": _first_layers_tf32,
    "groups of several": _groups,
    "depthwise in halves": _depthwise_halves,
    "depthwise": _depthwise("fprop"),
    "depthwise data gradients": _depthwise("dgrad"),
    "depthwise weight gradients": _depthwise("wgrad"),
    "rows": _rows,
    "rows' data gradients": _rows_gradients,
    "odd channels": _odd_channels,
    "volumes": _volumes,
    "pooled": _pooled,
    "pruned": _pruned,
    "pruned pairs": _pruned_pairs,
    "pruned parts": _pruned_parts,
    "batch norms": _batch_norms(norm_cases.forward, "unread"),
    "batch norms' gradients": _batch_norms(norm_cases.backward, "masked"),
    "poolings": _poolings,
    "poolings' gradients": _pooling_gradients,
    "parallel": _parallel,
    "bottlenecks": _bottlenecks,
    "inverted residuals": _inverted_residuals,
    "expanded and filtered": _expanded,
    "concatenations": _concatenations,
    "channels scaled": _scaled,
    "layer norms": _layer_norms,
    "group norms": _group_norms,
    "squeeze-and-excitation": _squeeze_excitations,
    "gated 1x1": _gated_1x1s,
    "in bands": _in_bands,
    "gated on CPUs": _gated_on_cpus,
    "averaged": _averaged,
    "casts": _casts,
}


@lru_cache(maxsize=4096)
def family_problem(seed: int, family: str, index: int, most_flops: float = MOST_FLOPS) -> Problem:
    """Case `index` of a family and a seed, of at most so many operations."""
    draw = random.Random(f"{seed}:{family}:{index}")
    while True:
        problem = FAMILIES[family](draw)
        if _is_small(problem, most_flops):
            return problem


def _is_small(problem: Problem, most_flops: float) -> bool:
    if isinstance(problem, ConvProblem):
        largest = max(spec.elements for spec in (problem.x_spec, problem.weight_spec, problem.conv_spec))
        return problem.flops <= most_flops and largest <= MOST_ELEMENTS
    return problem.flops <= most_flops


def own_problems(
    engine: Engine,
    target: Target,
    seed: int,
    tries: int,
    directions: Sequence[str] = (),
    most_flops: float = MOST_FLOPS,
) -> Iterator[Problem]:
    """Problems that an engine takes, from each family in turn, so many tries a family; of some directions, or of all."""
    for index in range(tries):
        for family in FAMILIES:
            problem = family_problem(seed, family, index, most_flops)
            if (not directions or direction_of(problem) in directions) and engine.accepts(problem, target):
                yield problem


def shape_of(problem: Problem) -> str:
    """A problem's sizes, strides and windows as text: equal for problems that differ in dtype, layout, epilogue or mask alone."""
    if isinstance(problem, SubgraphProblem):
        return re.sub(r"\b(fp32|fp16|bf16|i64|i32|i16)\b", "_", problem.text)
    if isinstance(problem, LinearProblem):
        return f"{problem.n} {problem.c} {problem.k}"
    if isinstance(problem, LayoutProblem):
        return f"{problem.spec.shape} {problem.source}"
    if isinstance(problem, Conv3dProblem):
        return replace(problem, epilogue=Epilogue(), dtype="fp32", numerics="strict").key
    sizes = replace(problem, epilogue=Epilogue(pool=problem.epilogue.pool), weight_mask="", mask=None)
    return replace(
        sizes, layout="nchw", x_dtype="fp32", weight_dtype="fp32", y_dtype="fp32", acc_dtype="fp32", numerics="strict"
    ).key
