"""Launches every kernel of ours over many shapes, for compute-sanitizer to watch (`make sanitize`). Not a pytest module.

    compute-sanitizer --tool memcheck --error-exitcode 1 python tests/gpu/sanitize.py

With PYTORCH_NO_CUDA_MEMORY_CACHING=1 every buffer is an allocation of its own, so that a read past its end is seen.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, product
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "engines"))  # the cases of pieces that other tests have

import norm_cases
import pool_backward_cases

from convoy.engines.base import Buffers, Executable
from convoy.engines.manifest import MANIFEST, WAITING, load_engine, waiting
from convoy.engines.piece import read
from convoy.engines.pruned.walk import positions
from convoy.measurement.data import make_data
from convoy.measurement.detect import detect_target
from convoy.problem import ConvProblem, Epilogue, LinearProblem, Pool, Problem, SubgraphProblem, WeightMask

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
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


PIECES = ("triton.batch_norm", "triton.pool_backward", "triton.pooling")
"""Engines of pieces of the graph."""

DIRECTIONS = {"triton.dgrad": "dgrad", "triton.wgrad": "wgrad", "triton.stem_wgrad": "wgrad"}


def mask(engine: str, shape: tuple[int, ...]) -> WeightMask:
    """A third of single weights; two of every four channels; or half of the filters with a third of the channels."""
    generator = np.random.default_rng(shape)
    nonzero = generator.random(shape) < 1 / 3
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


def pieces(name: str) -> Iterator[Problem]:
    """Pieces of the graph that an engine for them takes."""
    if name == "triton.batch_norm":
        for case in norm_cases.CASES:
            yield from (norm_cases.forward(case), norm_cases.forward(case, unread=True))
            yield from (norm_cases.backward(case), norm_cases.backward(case, masked=True))
    elif name == "triton.pool_backward":
        for case, indices in product(pool_backward_cases.CASES, ("i64", "i16")):
            yield pool_backward_cases.piece(case, indices=indices)
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


def filled(shape: tuple[int, ...], dtype: torch.dtype, layout: str = "nhwc") -> torch.Tensor:
    """Ones on the device, in channels_last where there are four sizes."""
    tensor = torch.ones(shape, dtype=dtype, device="cuda")
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 and layout == "nhwc" else tensor


def launch_forward(executable: Executable, problem: Problem, dtype: torch.dtype) -> None:
    """One convolution or linear layer; a weight with a mask has its zeros."""
    epilogue, layout = problem.epilogue, getattr(problem, "layout", "nhwc")
    weight = filled(problem.weight_spec.shape, dtype).contiguous()
    if isinstance(problem, ConvProblem) and problem.mask is not None:
        weight *= torch.from_numpy(positions(problem.mask)).to(weight)
    constants = [weight, *([filled((problem.k,), dtype)] if epilogue.bias else [])]
    args = (filled(problem.x_spec.shape, dtype, layout),)
    if len(args[0].shape) == 4:
        args[0][:, ::3] = 0  # for engines that look for zeros
    inner = problem.conv_spec if isinstance(problem, ConvProblem) else problem.y_spec
    args += (filled(inner.shape, dtype, layout),) if epilogue.residual else ()
    workspace = torch.empty(executable.workspace_bytes, dtype=torch.uint8, device="cuda")
    result = torch.empty_like(filled(problem.y_spec.shape, dtype, layout))
    executable.launch(Buffers(args, [result], executable.pack(constants)), workspace)
    torch.cuda.synchronize()


def launch_gradient(executable: Executable, problem: ConvProblem, dtype: torch.dtype) -> None:
    """One dgrad or wgrad."""
    x, weight, dy = (filled(s.shape, dtype) for s in (problem.x_spec, problem.weight_spec, problem.y_spec))
    args, result = ((dy, weight), x) if problem.direction == "dgrad" else ((x, dy), weight)
    workspace = torch.empty(executable.workspace_bytes, dtype=torch.uint8, device="cuda")
    executable.launch(Buffers(args, [torch.empty_like(result)]), workspace)
    torch.cuda.synchronize()


def launch_piece(executable: Executable, problem: SubgraphProblem) -> None:
    """One piece of the graph."""
    graph = read(problem.text)
    specs = [graph.values[name].spec for name in graph.outputs]
    results = [torch.empty_like(filled(spec.shape, DTYPES[spec.dtype])) for spec in specs]
    workspace = torch.empty(executable.workspace_bytes, dtype=torch.uint8, device="cuda")
    executable.launch(Buffers(make_data(problem, 1, "normal", "cuda").args, results, executable.pack(())), workspace)
    torch.cuda.synchronize()


def launch(executable: Executable, problem: Problem) -> str:
    """One problem of any kind; what stands for its shape."""
    if isinstance(problem, SubgraphProblem):
        launch_piece(executable, problem)
        return problem.key
    dtype = DTYPES[problem.x_spec.dtype]
    if isinstance(problem, ConvProblem) and problem.direction != "fprop":
        launch_gradient(executable, problem, dtype)
    else:
        launch_forward(executable, problem, dtype)
    return f"{problem.x_spec.shape} {problem.weight_spec.shape}"


def main() -> int:
    """Launch, wait, and say how much was launched."""
    target = detect_target("cuda")
    only = sys.argv[1:]
    launches, shapes = 0, set()
    ours = ("triton.", "cuda.", "pruned.", "zeroskip.")
    for name in (name for name in (*MANIFEST, *WAITING) if name.startswith(ours)):
        if only and name not in only:
            continue
        engine = load_engine(name, waiting())
        for problem in problems_of(name):
            if not engine.accepts(problem, target):
                continue
            executable = engine.build(problem, engine.space(problem, target)[0], target)
            shapes.add(launch(executable, problem))
            launches += 1
    print(f"{launches} launches over {len(shapes)} shapes")
    return 0 if launches else 1


if __name__ == "__main__":
    sys.exit(main())
