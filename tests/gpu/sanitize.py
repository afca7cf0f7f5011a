"""Launches every kernel of ours over many shapes in several settings, for compute-sanitizer to watch (`make sanitize`).

From the repository's root, as a module (run as a file, it does not find the package `tests`):

    python -m tests.gpu.sanitize --jobs 8                   every engine under every tool, so many processes at a time
    python -m tests.gpu.sanitize --jobs 8 triton.gemv       some engines; --tools memcheck racecheck: some tools
    compute-sanitizer --tool memcheck python -m tests.gpu.sanitize triton.gemv

With PYTORCH_NO_CUDA_MEMORY_CACHING=1, which --jobs sets, every buffer is an allocation of its own: a read past its end is seen.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from convoy.engines import dynamic_weight
from convoy.engines.base import Buffers, Engine, Executable, Knobs
from convoy.engines.manifest import load_engine
from convoy.engines.sparse_weights.codegen.lower_mask import positions
from convoy.engines.subgraph import parse_subgraph
from convoy.errors import CompileError
from convoy.measurement.data import make_data, result_specs
from convoy.measurement.device.detect import detect_target
from convoy.problem import ConvProblem, LayoutProblem, Problem, SubgraphProblem
from convoy.target import Target
from tests.gpu.sanitize_jobs import ENGINES, TOOLS, run_all
from tests.gpu.sanitize_problems import launches_of, shape_of

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

STORED_BY_TMA = frozenset(
    {"triton.pointwise", "triton.pooled", "triton.split_fp32", "triton.stem", "triton.swapped", "zeroskip.channels"}
)
"""Engines that store the parts of a split sum, or what is pooled, into their workspace by TMA. initcheck does not see such stores
and reports every element that the next launch reads. So this workspace begins as NaN here: initcheck sees it written, and what a
kernel left out is NaN in the result, which is looked at."""


def filled(shape: Sequence[int], dtype: torch.dtype, layout: str = "nhwc", value: float = 1) -> torch.Tensor:
    """One value everywhere, on the device, in channels_last where there are four sizes."""
    tensor = torch.full(tuple(shape), value, dtype=dtype, device="cuda")
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 and layout == "nhwc" else tensor


def workspace(name: str, executable: Executable) -> torch.Tensor | None:
    """The workspace of a launch: none where it needs none."""
    if not executable.workspace_bytes:
        return None
    room = torch.empty(executable.workspace_bytes, dtype=torch.uint8, device="cuda")
    return room.fill_(255) if name in STORED_BY_TMA else room


def launch(
    name: str, executable: Executable, args: Sequence[torch.Tensor], results: list[torch.Tensor],
    constants: Sequence[torch.Tensor] = (),
) -> None:  # fmt: skip
    """One launch, which must write all of its results: they are NaN before."""
    given: list[torch.Tensor | None] = [None if executable.allocates_results else result for result in results]
    buffers = Buffers(tuple(args), given, executable.pack(constants))
    executable.launch(buffers, workspace(name, executable))
    torch.cuda.synchronize()
    if any(result is None or bool(result.isnan().any()) for result in buffers.results):
        raise ValueError(f"{name}: results are not all written, or from what was not written")


def launch_forward(name: str, executable: Executable, problem: Problem, dtype: torch.dtype) -> None:
    """One convolution or linear layer; a weight with a mask has its zeros."""
    epilogue, layout = problem.epilogue, getattr(problem, "layout", "nhwc")
    dynamic_weight = isinstance(problem, ConvProblem) and problem.dynamic_weight
    weight = filled(problem.weight_spec.shape, dtype, layout if dynamic_weight else "nchw")
    if isinstance(problem, ConvProblem) and problem.mask is not None:
        weight *= torch.from_numpy(positions(problem.mask)).to(weight)
    constants = [weight, *([filled((problem.k,), dtype)] if epilogue.bias else [])]
    args = [filled(problem.x_spec.shape, dtype, layout)]
    if args[0].dim() == 4:
        args[0][:, ::3] = 0  # for engines that look for zeros
    inner = problem.conv_spec if isinstance(problem, ConvProblem) else problem.y_spec
    args += constants if dynamic_weight else []
    args += [filled(inner.shape, dtype, layout)] if epilogue.residual else []
    y = filled(problem.y_spec.shape, dtype, layout, torch.nan)
    launch(name, executable, args, [y], () if dynamic_weight else constants)


def launch_gradient(name: str, executable: Executable, problem: ConvProblem, dtype: torch.dtype) -> None:
    """One dgrad or wgrad, with the bias's gradient where the epilogue has one."""
    is_dgrad = problem.direction == "dgrad"
    read_by = (problem.y_spec, problem.weight_spec) if is_dgrad else (problem.x_spec, problem.y_spec)
    made = [spec.shape for spec in result_specs(problem)]
    launch(
        name, executable, [filled(s.shape, dtype) for s in read_by], [filled(s, dtype, value=torch.nan) for s in made]
    )


def launch_piece(name: str, executable: Executable, problem: SubgraphProblem) -> None:
    """One piece of the graph."""
    graph, data = parse_subgraph(problem.text), make_data(problem, 1, "normal", "cuda")
    specs = [graph.values[value].spec for value in graph.outputs]
    results = [filled(spec.shape, DTYPES[spec.dtype], problem.layout, torch.nan) for spec in specs]
    launch(name, executable, data.args, results, data.constants)


def launch_problem(name: str, executable: Executable, problem: Problem) -> None:
    """One problem of any kind."""
    if isinstance(problem, SubgraphProblem):
        launch_piece(name, executable, problem)
        return
    if isinstance(problem, LayoutProblem):
        copied = (problem.spec.shape, DTYPES[problem.spec.dtype])
        launch(name, executable, [filled(*copied, problem.source)], [filled(*copied, problem.layout, torch.nan)])
        return
    dtype = DTYPES[problem.x_spec.dtype]
    if isinstance(problem, ConvProblem) and problem.direction != "fprop":
        launch_gradient(name, executable, problem, dtype)
    else:
        launch_forward(name, executable, problem, dtype)


def build(engine: Engine, problem: Problem, knobs: Knobs, target: Target) -> Executable | None:
    """One setting; None for one that does not compile, which a search passes over too. The first one has to."""
    try:
        return dynamic_weight.build(engine, problem, knobs, target)
    except CompileError as error:
        if knobs == engine.space(problem, target)[0]:
            raise
        print(f"{engine.id} {problem} [{knobs}] does not compile: {error}")
        return None


def launch_all(names: Sequence[str]) -> int:
    """Launch, wait, and say how much was launched."""
    target = detect_target("cuda")
    launches, shapes = 0, set()
    for name in names:
        engine = load_engine(name)
        for problem, knobs in launches_of(engine, target):
            executable = build(engine, problem, knobs, target)
            if executable is not None:
                launch_problem(name, executable, problem)
                shapes.add(shape_of(problem))
                launches += 1
    print(f"{launches} launches over {len(shapes)} shapes")
    return 0 if launches else 1


def main() -> int:
    """Launch in this process, or run this file in others under the tools."""
    parser = argparse.ArgumentParser(description="Launch every kernel of ours over many shapes.")
    parser.add_argument("engines", nargs="*", help="ids; all of ours, where none is given")
    parser.add_argument("--jobs", type=int, default=0, help="run under compute-sanitizer, so many processes at a time")
    parser.add_argument("--tools", nargs="+", default=TOOLS, choices=TOOLS, help="of compute-sanitizer; all without")
    given = parser.parse_args()
    engines = given.engines or ENGINES
    return run_all(Path(__file__), engines, given.tools, given.jobs) if given.jobs else launch_all(engines)


if __name__ == "__main__":
    sys.exit(main())
