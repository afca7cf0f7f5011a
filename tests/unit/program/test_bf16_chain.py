"""A net in bf16, and one in fp32 under numerics `half`, on a CPU with AMX: one chain of C kernels.

The instructions for bf16 are emulated, so that every CPU runs this.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import convoy
from convoy.engines.compilers import host_compiler
from convoy.engines.cpu.bf16 import cpu_direct_bf16
from convoy.engines.cpu.bf16.bf16_units import UNITS
from convoy.engines.manifest import load_engine
from convoy.measurement import detect_target
from convoy.perfdb import Measurement, Status
from convoy.pipeline.check import end_to_end
from convoy.pipeline.check.least_error import LEAST_HALF_ERROR, LEAST_LOOSE_ERROR, least_error
from convoy.pipeline.net import capture_net
from convoy.pipeline.select import make_plan, select
from convoy.pipeline.selection_input import distinct_problems
from convoy.problem import Problem
from convoy.program.native_chains import ChainedProgram
from convoy.program.runnable_program import build_program
from convoy.target import Target
from convoy.tune import SearchResult

pytestmark = pytest.mark.skipif(not host_compiler.compiler_support(), reason="needs a C compiler")

NATIVE = (
    "cpu.direct_bf16", "cpu.depthwise", "cpu.pooling", "cpu.scale", "cpu.concat", "cpu.layout", "cpu.group_norm",
)  # fmt: skip


class Small(nn.Module):
    """A first layer, a depthwise block with a gate, a norm, a branch, a pooling and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.wide = nn.Conv2d(3, 24, 3, 2, 1), nn.Conv2d(24, 48, 1)
        self.depthwise, self.gate = nn.Conv2d(48, 48, 3, 1, 1, groups=48), nn.Conv2d(48, 48, 1)
        self.narrow, self.grouped = nn.Conv2d(48, 24, 1), nn.Conv2d(24, 40, 3, 1, 1, groups=2)
        self.norm, self.last = nn.GroupNorm(8, 64), nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[n, 3, h, w] -> [n, 10]."""
        x = nn.functional.max_pool2d(torch.relu(self.stem(x)), 3, 2, 1)
        y = nn.functional.silu(self.depthwise(nn.functional.silu(self.wide(x))))
        y = y * torch.sigmoid(self.gate(nn.functional.adaptive_avg_pool2d(y, 1)))
        x = self.narrow(y) + x
        x = torch.relu(self.norm(torch.cat((x, torch.relu(self.grouped(x))), 1)))
        return self.last(torch.flatten(nn.functional.adaptive_avg_pool2d(x, 1), 1))


def emulate(patch: pytest.MonkeyPatch) -> None:
    """As if this process could use AMX: its instructions are plain C."""
    real = cpu_direct_bf16.kernel
    patch.setattr(cpu_direct_bf16, "bf16_units", lambda: (UNITS, ""))
    patch.setattr(cpu_direct_bf16, "kernel", lambda dtype, **_: real(dtype, emulated=True))


def image(dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    x = torch.randn(2, 3, 22, 20, generator=torch.Generator().manual_seed(seed))
    return x.to(dtype).contiguous(memory_format=torch.channels_last)


CASES = {"bf16": (torch.bfloat16, "as_torch"), "fp32 under half": (torch.float32, "half")}


def rows_of(problem: Problem, target: Target) -> list[Measurement]:
    """As if PyTorch's kernels were the slowest, and the first settings of those in C had been measured."""
    found = [(load_engine("aten"), 1e6), *((load_engine(name), 10.0) for name in NATIVE)]
    return [
        Measurement(problem.key, engine.config(engine.space(problem, target)[0]), "", "", Status.OK, 9, time_us)
        for engine, time_us in found
        if engine.accepts(problem, target)
    ]


@pytest.fixture(scope="module", params=CASES)
def built(request: pytest.FixtureRequest):
    """The net, its plan and its program, by kernels in C alone."""
    dtype, numerics = CASES[request.param]
    torch.manual_seed(0)
    model = Small().eval().to(dtype).to(memory_format=torch.channels_last)
    settings = convoy.Settings(layout="nhwc", numerics=numerics, only_engines=NATIVE)
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        emulate(patch)
        net = capture_net("small", model, (image(dtype),), {}, settings, detect_target("cpu"))
        found = SearchResult(
            {problem.key: rows_of(problem, net.target) for problem in distinct_problems(net.regions, net.copies)}
        )
        plan = make_plan(net, select(net, found, settings), settings)
        program = build_program(plan, net.captured, net.regions_by_nodes, net.target, settings)
    return model, net, plan, program.runnable, dtype


def test_all_of_the_net_is_one_chain(built) -> None:
    _, _, plan, runnable, _ = built
    used = [step.config.engine for step in plan.steps]
    assert set(used) <= set(NATIVE), used
    assert used.count("cpu.direct_bf16") == 6
    assert isinstance(runnable, ChainedProgram)
    assert [chain.count for chain in runnable.chains] == [len(used)]


def test_its_outputs_are_as_exact_as_bf16_allows(built) -> None:
    model, net, _, runnable, dtype = built
    x = image(dtype, 1)
    with torch.no_grad():
        exact = model.double()(x.double())
        model.to(dtype)
        stock = float((model(x).double() - exact).norm() / exact.norm())
    (found,) = runnable([x])
    error = float((found.double() - exact).norm() / exact.norm())
    numerics = "half" if dtype == torch.float32 else "as_torch"
    assert error < max(end_to_end.WORST_ERROR * stock, least_error(numerics, net.captured.graph))
    assert error > 1e-5  # operands were rounded


def test_least_errors_follow_from_dtypes_and_numerics(built) -> None:
    _, net, _, _, dtype = built
    wanted = LEAST_HALF_ERROR if dtype == torch.float32 else LEAST_LOOSE_ERROR
    assert least_error("half", net.captured.graph) == wanted
    assert least_error("as_torch", net.captured.graph) == LEAST_LOOSE_ERROR
