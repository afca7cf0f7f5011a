"""The problems on which `sanitize.py` launches each engine: small shapes of every kind, in several settings. Not a test module.

First shapes that were chosen, then, until an engine has enough, random ones of the families that the fuzzing has too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice, product, takewhile

import numpy as np

from convoy.engines.base import Engine, Knobs
from convoy.engines.hopper.chains.bottleneck_problem import subgraph_of
from convoy.engines.hopper.chains.bottleneck_tile_config import Bottleneck
from convoy.engines.hopper.chains.inverted_residual_block import InvertedResidual
from convoy.engines.hopper.chains.inverted_residual_problem import inverted_subgraph
from convoy.problem import (
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
from convoy.target import Target
from tests.fuzz.problem_families import merge, own_problems, shape_of
from tests.unit.engines import (
    gated_1x1_cases,
    group_norm_cases,
    norm_cases,
    pool_backward_cases,
    squeeze_excitation_cases,
)
from tests.unit.engines.fusion import cases as fusion_cases

FULL = Epilogue(bias=True, residual=True, activation="relu")
PLAIN = Epilogue()

SIZES = [
    # n c h w k r s pad stride dilation groups
    (1, 64, 14, 14, 96, 3, 3, (1, 1), (1, 1), (1, 1), 1),
    (1, 256, 7, 7, 128, 3, 3, (1, 1), (1, 1), (1, 1), 1),
    (3, 40, 13, 11, 72, 3, 3, (1, 1), (1, 1), (1, 1), 1),
    (2, 64, 28, 28, 64, 3, 3, (1, 1), (2, 2), (1, 1), 1),
    (1, 32, 35, 35, 48, 3, 3, (0, 0), (2, 2), (1, 1), 1),
    (1, 32, 17, 17, 32, 3, 3, (4, 4), (1, 1), (4, 4), 1),
    (1, 64, 17, 17, 64, 1, 7, (0, 3), (1, 1), (1, 1), 1),
    (2, 48, 14, 14, 64, 5, 5, (2, 2), (1, 1), (1, 1), 1),
    (2, 128, 14, 14, 64, 1, 1, (0, 0), (1, 1), (1, 1), 1),
    (1, 64, 15, 15, 128, 1, 1, (0, 0), (2, 2), (1, 1), 1),
    (1, 16, 6, 6, 16, 1, 1, (2, 2), (1, 1), (1, 1), 1),
    (4, 96, 1, 1, 24, 1, 1, (0, 0), (1, 1), (1, 1), 1),
    (1, 3, 56, 56, 64, 7, 7, (3, 3), (2, 2), (1, 1), 1),
    (1, 3, 63, 63, 64, 11, 11, (2, 2), (4, 4), (1, 1), 1),
    (2, 64, 9, 9, 32, 3, 3, (1, 1), (1, 1), (1, 1), 4),
    (2, 96, 14, 14, 96, 3, 3, (1, 1), (1, 1), (1, 1), 96),
    (1, 40, 15, 15, 40, 5, 5, (2, 2), (2, 2), (1, 1), 40),
    (1, 1, 30, 31, 1, 3, 3, (1, 1), (1, 1), (1, 1), 1),
    (1, 8, 20, 20, 8, 1, 2, (0, 0), (3, 4), (1, 1), 1),
    (1, 16, 3, 3, 16, 7, 7, (3, 3), (1, 1), (1, 1), 1),
    (1, 128, 28, 28, 32, 3, 3, (1, 1), (1, 1), (1, 1), 1),
    (1, 24, 9, 33, 40, 3, 3, (1, 1), (1, 1), (1, 1), 1),
    (5, 16, 5, 5, 264, 3, 3, (1, 1), (1, 1), (1, 1), 1),
    (1, 3, 33, 47, 32, 3, 3, (1, 1), (2, 2), (1, 1), 1),
    (1, 48, 10, 10, 48, 3, 3, (2, 2), (1, 1), (2, 2), 1),
    (1, 72, 7, 7, 72, 5, 5, (2, 2), (1, 1), (1, 1), 72),
    (3, 32, 9, 13, 32, 3, 3, (1, 1), (2, 2), (1, 1), 32),
    (1, 320, 7, 7, 1280, 1, 1, (0, 0), (1, 1), (1, 1), 1),
    (1, 24, 19, 23, 144, 1, 1, (0, 0), (1, 1), (1, 1), 1),
    (2, 12, 8, 8, 20, 3, 3, (1, 1), (1, 1), (1, 1), 2),
]
MATRICES = [(1, 512, 1000), (7, 520, 136), (40, 512, 264), (1, 96, 10)]
MERGES = [
    # n c side, filters of each convolution, what stands behind all of them, dtype
    (1, 480, 14, (192, 96, 16), "relu", "fp16"),
    (3, 72, 9, (64, 8, 24, 136), "", "bf16"),
    (2, 64, 1, (40, 64), "relu", "fp16"),
]
RELU = ("relu", "relu", "relu")
BOTTLENECKS = [
    Bottleneck(1, 7, 56, 256, 64, 256, "fp16", RELU, "x"),
    Bottleneck(2, 9, 28, 64, 128, 64, "bf16", RELU, "x"),
    Bottleneck(1, 5, 9, 128, 64, 128, "fp16", ("silu", "none", "relu"), "x"),
]
RELU6 = ("relu6", "relu6")
INVERTED = [
    InvertedResidual(1, 28, 28, 16, 96, 24, 3, 2, "fp16", RELU6, False),
    InvertedResidual(2, 14, 19, 24, 144, 24, 3, 1, "bf16", RELU6, True),
    InvertedResidual(2, 7, 7, 64, 192, 96, 3, 1, "fp16", ("silu", "silu"), False),
    InvertedResidual(1, 13, 9, 40, 120, 40, 5, 1, "bf16", ("hardswish", "hardswish"), True),
    InvertedResidual(3, 15, 11, 32, 72, 160, 5, 2, "fp16", ("relu", "none"), False),
]
EXPANDED = [replace(block, k=block.mid, residual=False, projects=False) for block in INVERTED]
KINDS = [("fp16", "half"), ("fp32", "as_torch"), ("bf16", "half"), ("fp32", "strict")]

LEAST_SHAPES = 30
"""Different shapes for each engine."""

MOST_PROBLEMS = 40
"""For each engine; every one is launched in its first setting."""

OFTEN = 3
"""Launches of each kind of setting, where an engine has it; every so many problems are launched in their last setting too."""

SEED, TRIES, MOST_FLOPS = 1, 400, 2e6
"""Of the random problems: everything is fifty times slower under the sanitizer."""

COOPERATION = frozenset(
    {
        "ahead",
        "blocks",
        "cluster",
        "consumers",
        "depth",
        "halo",
        "parts",
        "share",
        "shares",
        "slices",
        "split",
        "splits",
        "staged",
        "windows",
    }
)
"""Number knobs by which blocks, warps or copies work together: more than one, or none, is another kind of setting."""

MOST_WRITTEN = 2000
"""Weights in code that is made for them: the compiler takes a third of a millisecond for each."""

PIECES = (
    *("cuda.bottleneck", "cuda.fusion", "cuda.layout", "triton.batch_norm", "triton.group_norm", "triton.merged"),
    *("triton.pool_backward", "triton.pooling", "cuda.squeeze_excitation", "cuda.gated_1x1", "cuda.inverted_residual"),
    "cuda.expand_depthwise",
)
"""Engines of pieces of the graph."""

DTYPES, LAYOUTS = ("fp16", "bf16", "fp32"), ("nchw", "nhwc")

DIRECTIONS = {
    **dict.fromkeys(("cuda.dgrad", "triton.dgrad"), "dgrad"),
    **dict.fromkeys(("cuda.wgrad", "triton.wgrad", "triton.stem_wgrad"), "wgrad"),
}


def mask(engine: str, shape: tuple[int, ...]) -> WeightMask:
    """A third of single weights or fewer; two of every four channels; or half of the filters with a third of the channels."""
    generator = np.random.default_rng(shape)
    share = min(1 / 3, MOST_WRITTEN / np.prod(shape)) if engine == "pruned.cuda" else 1 / 3
    nonzero = generator.random(shape) < share
    if engine == "pruned.sparse24":
        nonzero &= np.arange(shape[1]).reshape(1, -1, 1, 1) % 4 < 2
    elif engine in ("pruned.blocks", "pruned.channels_gpu"):
        nonzero = np.ones(shape, bool)
        nonzero[: shape[0] // 2] = nonzero[:, shape[1] // 3 :] = False
    return WeightMask(shape, np.packbits(nonzero).tobytes())


def of_turn(turn: int, sizes: Sequence[tuple]) -> Iterator[tuple[int, tuple, tuple[str, str]]]:
    """Every size with its place and one of `KINDS`, the next one in the next turn: all sizes come before any comes again."""
    for place, size in enumerate(sizes):
        yield place, size, KINDS[(place + turn) % len(KINDS)]


def convolution(
    size: tuple, kind: tuple[str, str], epilogue: Epilogue, layout: str = "nhwc", direction: str = "fprop"
) -> ConvProblem:
    """A size of `SIZES` in one arithmetic."""
    n, c, h, w, k, r, s, pad, stride, dilation, groups = size
    dtype, numerics = kind
    return ConvProblem(
        n, c, h, w, k, r, s, *pad, *stride, *dilation, groups, layout, dtype, dtype, dtype,
        numerics=numerics, epilogue=epilogue, direction=direction,
    )  # fmt: skip


def pruned_problems(engine: str) -> Iterator[Problem]:
    """Every size with a mask, in every arithmetic and both memory formats."""
    for turn, layout in product(range(len(KINDS)), ("nchw", "nhwc")):
        for place, size, kind in of_turn(turn, SIZES):
            problem = convolution(size, kind, (FULL, PLAIN)[(turn + place) % 2], layout)
            yield problem.with_mask(mask(engine, problem.weight_spec.shape))


def problems(direction: str) -> Iterator[Problem]:
    """Every size in every arithmetic, forward with a full epilogue or none in turn."""
    for turn in range(len(KINDS)):
        for place, (n, c, k), (dtype, numerics) in of_turn(turn, MATRICES if direction == "fprop" else ()):
            yield LinearProblem(n, c, k, dtype, numerics, (FULL, PLAIN)[(turn + place) % 2])
        for place, size, kind in of_turn(turn, SIZES):
            epilogue = (FULL, PLAIN)[(turn + place) % 2] if direction == "fprop" else PLAIN
            yield convolution(size, kind, epilogue, direction=direction)


def pooled_problems() -> Iterator[Problem]:
    """Every forward convolution again, with a pooling behind it where one fits."""
    pools = (Pool("max", 2, 2, 2, 2), Pool("max", 3, 3, 2, 2, 1, 1), Pool("avg", 3, 3, 2, 2, 1, 1, True, True))
    for index, problem in enumerate(problems("fprop")):
        if isinstance(problem, ConvProblem):
            pool = pools[index % len(pools)]
            if problem.p >= pool.window_h and problem.q >= pool.window_w:
                yield replace(problem, epilogue=replace(problem.epilogue, pool=pool))


def in_turn(*given: Iterator[Problem]) -> Iterator[Problem]:
    """One of each, then the next of each, until all are at their end."""
    left = list(given)
    while left:
        found = [(source, next(source, None)) for source in left]
        left = [source for source, problem in found if problem is not None]
        yield from (problem for _, problem in found if problem is not None)


def pieces(name: str) -> Iterator[Problem]:
    """Pieces of the graph that an engine for them takes."""
    if name == "triton.batch_norm":
        for case, dtype in zip(norm_cases.CASES, ("", "bf16", "") * len(norm_cases.CASES), strict=False):
            yield from (norm_cases.forward(case, dtype), norm_cases.forward(case, dtype, unread=True))
            yield from (norm_cases.backward(case, dtype), norm_cases.backward(case, dtype, masked=True))
    elif name == "triton.group_norm":
        yield from (
            group_norm_cases.piece(case, dtype) for case, dtype in product(group_norm_cases.CASES, ("", "bf16"))
        )
    elif name == "cuda.squeeze_excitation":
        for case, dtype in product(squeeze_excitation_cases.CASES, ("", "bf16")):
            yield squeeze_excitation_cases.block(case, dtype)
    elif name == "cuda.gated_1x1":
        for case, dtype in product(gated_1x1_cases.CASES, ("", "bf16")):
            yield gated_1x1_cases.piece(case, dtype)
    elif name == "triton.merged":
        yield from (merge(*case) for case in MERGES)
    elif name == "cuda.bottleneck":
        for block, residual in product(BOTTLENECKS, ("x", "other", "none")):
            yield subgraph_of(replace(block, residual=residual))
    elif name == "cuda.inverted_residual":
        yield from map(inverted_subgraph, INVERTED)
    elif name == "cuda.expand_depthwise":
        yield from map(inverted_subgraph, EXPANDED)
    elif name == "cuda.fusion":
        yield from fusion_cases.CASES.values()
    elif name == "cuda.layout":
        sizes = product((LAYOUTS, LAYOUTS[::-1]), (1, 3, 8, 9, 64, 130), (4, 7, 30))
        for place, (layouts, c, side) in enumerate(sizes):
            yield LayoutProblem(TensorSpec((2, c, side, side + 1), DTYPES[place % 3]), *layouts)
    elif name == "triton.pool_backward":
        for case, (dtype, indices) in product(pool_backward_cases.CASES, (("", "i64"), ("bf16", "i16"))):
            yield pool_backward_cases.piece(case, dtype, indices)
        yield from map(pool_backward_cases.average_piece, pool_backward_cases.AVERAGES)
    else:
        for (n, c, side), (window, stride, pad) in product(
            ((2, 64, 14), (1, 37, 9)), ((3, 2, 1), (2, 2, 0), (3, 1, 1))
        ):
            out = (side + 2 * pad - window) // stride + 1
            pair = f"({window}, {window}), ({stride}, {stride}), ({pad}, {pad})"
            yield SubgraphProblem(
                f"graph 1\ninput %v0: fp16[{n},{c},{side},{side}]\n"
                f"%v1: fp16[{n},{c},{out},{out}] = aten.max_pool2d.default(%v0, {pair})\nreturn %v1\n",
                "nhwc",
            )


def chosen_problems(name: str) -> Iterator[Problem]:
    """Problems for an engine, whether it takes them or not."""
    if name.startswith("pruned."):
        return pruned_problems(name)
    if name == "triton.pooled":
        return pooled_problems()
    if name.startswith(("zeroskip.", "cuda.first_layer")):
        return in_turn(problems("fprop"), pooled_problems())
    if name == "triton.depthwise_gradients":
        return in_turn(problems("dgrad"), problems("wgrad"))
    if name in PIECES:
        return pieces(name)
    if name == "cuda.fresh":
        return (replace(p, dynamic_weight=True) for p in problems("fprop") if isinstance(p, ConvProblem))
    return problems(DIRECTIONS.get(name, "fprop"))


def problems_of(engine: Engine, target: Target) -> list[Problem]:
    """The problems of an engine: those chosen for it, and random ones until it has enough shapes."""
    chosen = (problem for problem in chosen_problems(engine.id) if engine.accepts(problem, target))
    found = list(islice(dict.fromkeys(chosen), MOST_PROBLEMS))
    shapes = {shape_of(problem) for problem in found}
    drawn = own_problems(engine, target, SEED, TRIES, most_flops=MOST_FLOPS)
    for problem in takewhile(lambda _: len(shapes) < LEAST_SHAPES, drawn):
        if shape_of(problem) not in shapes:
            shapes.add(shape_of(problem))
            found.append(problem)
    return found


def traits(knobs: Knobs) -> set[str]:
    """The kinds of a setting: its words and flags, and how its blocks, warps and copies work together."""
    flags = {f"{name}={value}" for name, value in knobs.items() if isinstance(value, (bool, str))}
    return flags | {f"{name}={min(int(knobs[name]), 2)}" for name in COOPERATION & set(knobs)}


def launches_of(engine: Engine, target: Target) -> Iterator[tuple[Problem, Knobs]]:
    """Each problem in its first setting; some in their last, and in the first one of a kind that was not seen often."""
    seen: Counter[str] = Counter()
    for place, problem in enumerate(problems_of(engine, target)):
        space = list(engine.space(problem, target))
        settings = [space[0], *space[-1 : len(space) * (place % OFTEN == 0)]]
        for knobs in space[1:]:
            own = set().union(*map(traits, settings))
            if any(seen[trait] < OFTEN for trait in traits(knobs) - own):
                settings.append(knobs)
        for knobs in dict.fromkeys(settings):
            seen.update(traits(knobs))
            yield problem, knobs
