"""Three-dimensional convolutions on the GPU: cuDNN's plans, ATen and `triton.conv3d` are right, and nets of them are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

import convoy
from convoy.engines.base import Engine
from convoy.engines.dynamic_weight import build
from convoy.engines.library.cudnn import ENGINE as CUDNN
from convoy.engines.library.cudnn import library
from convoy.engines.manifest import load_engine
from convoy.errors import CompileError
from convoy.measurement.accuracy import judge, make_data
from convoy.measurement.device.detect import detect_target
from convoy.problem import Conv3dProblem, Epilogue
from convoy.target import Target
from tests.unit.program.fast_net import always_kept

pytestmark = pytest.mark.gpu

KINDS = [("fp16", "half"), ("bf16", "half"), ("fp32", "as_torch"), ("fp32", "strict")]
TRIED = 4
"""Settings tried of each problem: the first, and others evenly from the rest."""

FULL = Epilogue(bias=True, residual=True, activation="relu")
SHAPES = {
    "3x3x3": Conv3dProblem(1, 32, (8, 14, 14), 48, (3, 3, 3), (1, 1, 1)),
    "3x3x3 stride 2": Conv3dProblem(2, 32, (8, 15, 13), 32, (3, 3, 3), (1, 1, 1), (2, 2, 2)),
    "3x3x3 odd channels": Conv3dProblem(2, 5, (6, 9, 7), 7, (3, 3, 3), (1, 1, 1)),
    "first layer": Conv3dProblem(1, 3, (8, 28, 28), 64, (3, 7, 7), (1, 3, 3), (1, 2, 2)),
    "2x2x2 stride 2": Conv3dProblem(1, 32, (8, 12, 12), 64, (2, 2, 2), (0, 0, 0), (2, 2, 2)),
    "1x3x3": Conv3dProblem(1, 32, (8, 14, 14), 64, (1, 3, 3), (0, 1, 1)),
    "3x1x1": Conv3dProblem(1, 64, (8, 14, 14), 64, (3, 1, 1), (1, 0, 0)),
    "1x1x1": Conv3dProblem(2, 64, (4, 7, 7), 128, (1, 1, 1)),
    "dilated": Conv3dProblem(1, 32, (9, 12, 12), 32, (3, 3, 3), (2, 2, 2), (1, 1, 1), (2, 2, 2)),
    "grouped": Conv3dProblem(1, 32, (6, 9, 9), 64, (3, 3, 3), (1, 1, 1), groups=4),
    "depthwise": Conv3dProblem(1, 32, (6, 9, 9), 32, (3, 3, 3), (1, 1, 1), groups=32),
}


@pytest.fixture(scope="module")
def target() -> Target:
    return detect_target("cuda")


def faults(engine: Engine, problem: Conv3dProblem, target: Target) -> list[str]:
    """The faults of some settings of an engine. At least one of cuDNN's plans must be right on all data."""
    space = list(engine.space(problem, target))
    found: list[str] = []
    right = 0
    for knobs in space[:1] + space[1 :: max(1, len(space) // (TRIED - 1))]:
        try:
            executable = build(engine, problem, knobs, target)
        except CompileError as error:
            if knobs == space[0]:
                found.append(f"{problem} [{knobs}] {error}")
            continue
        for kind in ("integer", "normal"):
            data = make_data(problem, 1, kind, "cuda")
            tf32 = problem.numerics == "as_torch"
            verdict = judge(executable, engine.family, problem, data, kind, tf32=tf32)
            right += verdict.ok
            transforms = engine is CUDNN and {"winograd", "fft"} & set(CUDNN.notes(problem, knobs))
            if not verdict.ok and not transforms:
                found.append(f"{problem} [{knobs}] on {kind} data: {verdict.reason}")
    return found if right else [*found, f"nothing of {problem} is right"]


@pytest.mark.parametrize("kind", KINDS, ids="-".join)
@pytest.mark.parametrize("layout", ["ncdhw", "ndhwc"])
@pytest.mark.parametrize("direction", ["fprop", "dgrad", "wgrad"])
@pytest.mark.parametrize("shape", SHAPES)
def test_plans_of_cudnn_are_right(shape: str, direction: str, layout: str, kind: tuple[str, str], target: Target):
    dtype, numerics = kind
    problem = replace(SHAPES[shape], dtype=dtype, numerics=numerics, direction=direction, layout=layout)
    support = CUDNN.supports(problem, target)
    if not support:
        pytest.skip(support.reason)
    assert not (found := faults(CUDNN, problem, target)), "\n".join(found)


@pytest.mark.parametrize("layout", ["ncdhw", "ndhwc"])
@pytest.mark.parametrize(
    "epilogue", [FULL, Epilogue(bias=True, activation="silu"), Epilogue(bias=True, activation="hardswish")]
)
def test_epilogues_are_right_inside_and_outside_of_the_graph(epilogue: Epilogue, layout: str, target: Target):
    problem = replace(SHAPES["3x3x3"], dtype="fp16", numerics="half", epilogue=epilogue, layout=layout)
    if reason := library.absence():
        pytest.skip(reason)
    assert CUDNN.supports(problem, target), CUDNN.supports(problem, target).reason
    assert not (found := faults(CUDNN, problem, target)), "\n".join(found)


def test_cudnn_has_plans_for_dense_volumes_in_both_formats(target: Target):
    """The problem that a 3-D U-Net consists of: a refusal would leave ATen alone."""
    if reason := library.absence():
        pytest.skip(reason)
    base = replace(SHAPES["3x3x3"], dtype="fp16", numerics="half")
    problems = [
        replace(base, layout=layout, direction=direction)
        for layout in ("ncdhw", "ndhwc")
        for direction in ("fprop", "dgrad", "wgrad")
    ]
    refused = {problem.key: support.reason for problem in problems if not (support := CUDNN.supports(problem, target))}
    assert not refused
    assert max(len(CUDNN.space(problem, target)) for problem in problems) > 2


@pytest.mark.parametrize("kind", KINDS, ids="-".join)
@pytest.mark.parametrize("layout", ["ncdhw", "ndhwc"])
@pytest.mark.parametrize("direction", ["fprop", "dgrad", "wgrad"])
def test_aten_is_right(direction: str, layout: str, kind: tuple[str, str], target: Target):
    dtype, numerics = kind
    found: list[str] = []
    for shape in SHAPES.values():
        problem = replace(shape, dtype=dtype, numerics=numerics, direction=direction, layout=layout)
        found += faults(load_engine("aten"), problem, target)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("kind", KINDS, ids="-".join)
@pytest.mark.parametrize("epilogue", [Epilogue(), FULL], ids=["bare", "epilogue"])
@pytest.mark.parametrize("shape", [name for name in SHAPES if name not in ("grouped", "depthwise")])
def test_our_implicit_gemm_is_right(shape: str, epilogue: Epilogue, kind: tuple[str, str], target: Target):
    """Some tiles of each kind, on integers to the last bit."""
    dtype, numerics = kind
    engine = load_engine("triton.conv3d")
    problem = replace(SHAPES[shape], dtype=dtype, numerics=numerics, layout="ndhwc", epilogue=epilogue)
    assert engine.supports(problem, target), engine.supports(problem, target).reason
    assert not (found := faults(engine, problem, target)), "\n".join(found)


def test_our_implicit_gemm_is_right_with_every_number_of_shared_slices(target: Target):
    engine = load_engine("triton.conv3d")
    problem = replace(SHAPES["3x3x3"], dtype="fp16", numerics="half", layout="ndhwc", epilogue=FULL)
    first = {(knobs["gather"], knobs["depth"]): knobs for knobs in reversed(engine.space(problem, target))}
    assert target.capability < 90 or set(first) == {(False, 1), (False, 2), (False, 4), (True, 1)}
    for knobs in first.values():
        data = make_data(problem, 1, "integer", "cuda")
        verdict = judge(build(engine, problem, knobs, target), engine.family, problem, data, "integer")
        assert verdict.ok, f"{knobs}: {verdict.reason}"


class _Factorised(nn.Module):
    """Two residual blocks of R(2+1)D."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv3d(3, 16, (1, 7, 7), (1, 2, 2), (0, 3, 3), bias=False)
        self.norm = nn.BatchNorm3d(16)
        self.space = nn.ModuleList(nn.Conv3d(16, 24, (1, 3, 3), padding=(0, 1, 1)) for _ in range(2))
        self.time = nn.ModuleList(nn.Conv3d(24, 16, (3, 1, 1), padding=(1, 0, 0)) for _ in range(2))
        self.head = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.relu(self.norm(self.first(x)))
        for space, time in zip(self.space, self.time, strict=True):
            y = functional.relu(time(functional.relu(space(y))) + y)
        return self.head(y.mean((2, 3, 4)))


class _Dense(nn.Module):
    """A level of a 3-D U-Net."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(
            nn.Conv3d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv3d(16, 32, 3, stride=2, padding=1), nn.ReLU()
        )
        self.up = nn.ConvTranspose3d(32, 16, 2, stride=2)
        self.out = nn.Conv3d(16, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.up(self.down(x)))


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "factorised": (_Factorised, (2, 3, 8, 32, 32)),
    "dense": (_Dense, (1, 1, 16, 16, 16)),
}


@pytest.mark.parametrize("effort", ["none", "quick"])
@pytest.mark.parametrize("last", [False, True], ids=["ncdhw", "ndhwc"])
@pytest.mark.parametrize("name", NETS)
def test_an_optimized_net_is_right(name: str, last: bool, effort: str, tmp_path: Path):
    torch.manual_seed(3)
    make, shape = NETS[name]
    exact = make().double().eval().cuda()
    model = make().eval().cuda().half()
    model.load_state_dict(exact.state_dict())
    exact.load_state_dict(model.state_dict())
    x = torch.randn(shape, device="cuda").half()
    x = x.contiguous(memory_format=torch.channels_last_3d) if last else x
    settings = convoy.Settings(effort=effort, db=tmp_path / "perf.db", time_s=60)
    with torch.no_grad(), always_kept():
        fast = convoy.optimize(model, (x,), settings=settings)
        expected = exact(x.double())
        for _ in range(3):
            found = fast(x).double()
            assert (found - expected).norm() / expected.norm() < 5e-3
        fresh = torch.randn_like(x)
        assert (fast(fresh).double() - exact(fresh.double())).norm() / exact(fresh.double()).norm() < 5e-3


@pytest.mark.parametrize("name", NETS)
def test_a_training_step_follows_pytorch(name: str, tmp_path: Path):
    torch.manual_seed(3)
    make, shape = NETS[name]
    model, stock = make().cuda(), make().cuda()
    stock.load_state_dict(model.state_dict())
    x = torch.randn(shape, device="cuda")
    y = torch.zeros_like(stock(x))
    model.load_state_dict(stock.state_dict())
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.05) for net in (model, stock)]
    settings = convoy.Settings(effort="quick", db=tmp_path / "perf.db", time_s=90)
    with always_kept():
        step = convoy.training_step(model, functional.mse_loss, optimizers[0], (x, y), settings=settings)
    for _ in range(3):
        step(x, y)
        optimizers[1].zero_grad()
        functional.mse_loss(stock(x), y).backward()
        optimizers[1].step()
    for have, want in zip(model.parameters(), stock.parameters(), strict=True):
        assert (have - want).norm() <= 5e-3 * want.norm() + 1e-5
