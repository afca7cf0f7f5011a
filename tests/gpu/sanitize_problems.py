"""What `sanitize.py` launches each engine on: shapes of every kind, small. Not a test module."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, product
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "engines"))  # the cases of pieces that other tests have

import norm_cases
import pool_backward_cases

from convoy.problem import ConvProblem, Epilogue, LinearProblem, Pool, Problem, SubgraphProblem, WeightMask

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
    # n c side, filters of each convolution, what stands behind all of them
    (1, 480, 14, (192, 96, 16), "relu"),
    (3, 72, 9, (64, 8, 24, 136), ""),
    (2, 64, 1, (40, 64), "relu"),
]

MOST_WRITTEN = 2000
"""Weights in code that is made for them: the compiler takes a third of a millisecond for each."""

PIECES = ("triton.batch_norm", "triton.merged", "triton.pool_backward", "triton.pooling")
"""Engines of pieces of the graph."""

DIRECTIONS = {"triton.dgrad": "dgrad", "triton.wgrad": "wgrad", "triton.stem_wgrad": "wgrad"}


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


def pruned_problems(engine: str) -> Iterator[Problem]:
    """Every size with a mask, in both memory formats and both types."""
    for layout, dtype, numerics in product(("nchw", "nhwc"), ("fp32", "fp16"), ("strict", "half")):
        for size, (n, c, h, w, k, r, s, pad, stride, dilation, groups) in enumerate(SIZES):
            if (dtype, numerics) in (("fp32", "strict"), ("fp16", "half")):
                problem = ConvProblem(
                    n, c, h, w, k, r, s, *pad, *stride, *dilation, groups, layout, dtype, dtype, dtype, numerics=numerics,
                    epilogue=(FULL, PLAIN)[size % 2],
                )  # fmt: skip
                yield problem.with_mask(mask(engine, problem.weight_spec.shape))


def problems(direction: str) -> Iterator[Problem]:
    """Every size in every arithmetic, forward with a full epilogue or none in turn."""
    for index, (dtype, numerics) in enumerate((("fp16", "half"), ("fp32", "as_torch"), ("fp32", "strict"))):
        for size, (n, c, h, w, k, r, s, pad, stride, dilation, groups) in enumerate(SIZES):
            yield ConvProblem(
                n, c, h, w, k, r, s, *pad, *stride, *dilation, groups, "nhwc", dtype, dtype, dtype,
                numerics=numerics, epilogue=(FULL, PLAIN)[(index + size) % 2] if direction == "fprop" else PLAIN,
                direction=direction,
            )  # fmt: skip
        for size, (n, c, k) in enumerate(MATRICES if direction == "fprop" else ()):
            yield LinearProblem(n, c, k, dtype, numerics, (FULL, PLAIN)[(index + size) % 2])


def pooled_problems() -> Iterator[Problem]:
    """Every forward convolution again, with a pooling behind it where one fits."""
    pools = (Pool("max", 2, 2, 2, 2), Pool("max", 3, 3, 2, 2, 1, 1), Pool("avg", 3, 3, 2, 2, 1, 1, True, True))
    for index, problem in enumerate(problems("fprop")):
        if isinstance(problem, ConvProblem):
            pool = pools[index % len(pools)]
            if problem.p >= pool.window_h and problem.q >= pool.window_w:
                yield replace(problem, epilogue=replace(problem.epilogue, pool=pool))


def merge(n: int, c: int, side: int, filters: tuple[int, ...], behind: str) -> SubgraphProblem:
    """Parallel 1x1 convolutions with biases."""
    lines, results = ["graph 1", f"input %v0: fp16[{n},{c},{side},{side}]"], []
    for i, k in enumerate(filters):
        lines += [f"constant %w{i}: fp16[{k},{c},1,1]", f"constant %b{i}: fp16[{k}]"]
    for i, k in enumerate(filters):
        image = f"fp16[{n},{k},{side},{side}]"
        lines.append(f"%y{i}: {image} = conv2d(%v0, %w{i}, %b{i}, (1, 1), (0, 0), (1, 1), 1)")
        results.append(f"%y{i}")
        if behind:
            lines.append(f"%z{i}: {image} = aten.{behind}.default(%y{i})")
            results[-1] = f"%z{i}"
    return SubgraphProblem("\n".join([*lines, "return " + ", ".join(results)]) + "\n", "nhwc")


def pieces(name: str) -> Iterator[Problem]:
    """Pieces of the graph that an engine for them takes."""
    if name == "triton.batch_norm":
        for case in norm_cases.CASES:
            yield from (norm_cases.forward(case), norm_cases.forward(case, unread=True))
            yield from (norm_cases.backward(case), norm_cases.backward(case, masked=True))
    elif name == "triton.merged":
        yield from (merge(*case) for case in MERGES)
    elif name == "triton.pool_backward":
        for case, indices in product(pool_backward_cases.CASES, ("i64", "i16")):
            yield pool_backward_cases.piece(case, indices=indices)
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


def problems_of(name: str) -> Iterator[Problem]:
    """What an engine is launched on, where it takes it."""
    if name.startswith("pruned."):
        return pruned_problems(name)
    if name == "triton.pooled" or name.startswith("zeroskip."):
        return chain(problems("fprop"), pooled_problems())
    if name == "triton.depthwise_gradients":
        return chain(problems("dgrad"), problems("wgrad"))
    if name in PIECES:
        return pieces(name)
    return problems(DIRECTIONS.get(name, "fprop"))
