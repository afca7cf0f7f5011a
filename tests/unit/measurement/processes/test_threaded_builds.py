"""Kernels of engines that allow it are compiled at the same time; what one of them cannot compile runs on the baseline."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import convoy
from convoy.engines.algorithms.gemm import Gemm
from convoy.engines.hopper import nvrtc_kernel
from convoy.engines.hopper.nvrtc_kernel import absence
from convoy.engines.library.aten import Aten
from convoy.engines.manifest import load_engine
from convoy.errors import CompileError
from convoy.measurement import detect_target
from convoy.measurement.processes import threaded_builds
from convoy.measurement.processes.threaded_builds import Built, builds_begun, built_in_threads, cores_shared
from convoy.pipeline import tune_in_time, whole_model
from convoy.pipeline.check import end_to_end, net_check
from convoy.plan import load, save
from convoy.problem import EngineConfig, Problem, parse_problem
from convoy.target import Target
from tests.unit.program.test_compiler_faults import X, by_gemm

WAIT_S = 60.0
H100 = Target("cuda", "an H100 that is not there", "sm_90", 132, 80 << 30, 50 << 20)


def in_threads(wanted: Sequence[tuple[Problem, EngineConfig]], target: Target) -> dict[int, Built]:
    with built_in_threads(wanted, target, ()) as jobs:
        return {index: job.result() for index, job in jobs.items()}


@pytest.fixture
def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 4, 3)).eval()


@pytest.fixture
def plan(net: nn.Sequential, tmp_path: Path) -> Path:
    settings = convoy.Settings(effort="none", solver="baseline", db=tmp_path / "perf.db")
    path = tmp_path / "net.plan.json"
    save(by_gemm(convoy.optimize(net, (X,), settings=settings).plan), path)
    return path


def test_two_kernels_are_built_at_once(net: nn.Sequential, plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build, both = Gemm.build, threading.Barrier(2)

    def waiting(*args: object) -> object:
        both.wait(WAIT_S)  # broken where the second build begins after the first one
        return build(*args)

    monkeypatch.setattr(Gemm, "builds_in_threads", True)
    monkeypatch.setattr(Gemm, "build", waiting)
    fast = convoy.load(net, plan, (X,))
    assert [step.config.engine for step in fast.plan.steps].count("gemm") == 2
    with torch.no_grad():
        assert torch.allclose(fast(X), net(X), atol=1e-5)


def test_each_engines_first_kernel_begins_before_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A C source is compiled once for its engine; with one thread the order of the builds is the order in which they begin."""
    begun: list[str] = []
    monkeypatch.setattr(threaded_builds, "build", lambda engine, *_: begun.append(engine.id))
    monkeypatch.setattr(threaded_builds, "ThreadPoolExecutor", lambda *_, **__: ThreadPoolExecutor(1))
    wide, narrow = (
        parse_problem(f"conv:fprop:n1c{c}h8w8k16r3s3:p1x1:s1x1:d1x1:g1:nhwc:fp32.fp32.fp32.fp32:as_torch:none")
        for c in (16, 8)
    )
    order = ("cpu.direct", "cpu.direct", "cpu.winograd", "cpu.winograd")
    wanted = [(problem, EngineConfig(name)) for name, problem in zip(order, (wide, narrow, wide, narrow), strict=True)]
    in_threads(wanted, detect_target("cpu"))
    assert begun == ["cpu.direct", "cpu.winograd", "cpu.direct", "cpu.winograd"]


DIRECT = tuple(
    (
        parse_problem(f"conv:fprop:n1c{c}h8w8k16r3s3:p1x1:s1x1:d1x1:g1:nhwc:fp32.fp32.fp32.fp32:as_torch:none"),
        EngineConfig("cpu.direct"),
    )
    for c in (8, 16)
)


@pytest.fixture
def four_threads() -> Generator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("four_threads")
@pytest.mark.parametrize(("compilers", "left"), [(0, 4), (1, 3), (3, 1), (9, 1)])
def test_operators_leave_cores_to_compilers(compilers: int, left: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threaded_builds, "compilers_at_work", lambda: compilers)
    built: Future[Built] = Future()
    built.set_result(CompileError("cpu.direct", "no"))
    with cores_shared({DIRECT[0]: built}, detect_target("cpu")):
        assert torch.get_num_threads() == left
    assert torch.get_num_threads() == 4
    with cores_shared({DIRECT[0]: built}, H100):
        assert torch.get_num_threads() == 4


@pytest.mark.usefixtures("four_threads")
def test_kernels_are_for_the_callers_threads_whatever_it_sets_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    caller_has_one, found = threading.Event(), list[int]()

    def counting(*_: object) -> None:
        caller_has_one.wait(WAIT_S)
        found.append(torch.get_num_threads())

    monkeypatch.setattr(threaded_builds, "build", counting)
    monkeypatch.setattr(threaded_builds, "compilers_at_work", lambda: 3)
    target = detect_target("cpu")
    with builds_begun(DIRECT, target, ()) as begun, cores_shared(begun, target):
        assert torch.get_num_threads() == 1
        caller_has_one.set()
        for each in begun.values():
            each.result()
    assert found == [4, 4]


def test_what_no_thread_may_build_is_built_meanwhile(
    net: nn.Sequential, plan: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads wait for the build of PyTorch's own step, though a plan has it last."""
    build, aten, begun = Gemm.build, Aten.build, threading.Event()
    deeper = nn.Sequential(*net, nn.Conv2d(4, 3, 3)).eval()
    settings = convoy.Settings(effort="none", solver="baseline", db=plan.parent / "perf.db")
    mixed = by_gemm(convoy.optimize(deeper, (X,), settings=settings).plan)
    last = len(mixed.steps) - 1
    assert mixed.steps[last].config.engine == "gemm"
    steps = (*mixed.steps[:-1], dataclasses.replace(mixed.steps[-1], config=load_engine("aten").config()))
    save(dataclasses.replace(mixed, steps=steps), plan)

    def waiting(*args: Any) -> Any:
        assert begun.wait(WAIT_S)
        return build(*args)

    def beginning(*args: Any) -> Any:
        begun.set()
        return aten(*args)

    monkeypatch.setattr(Gemm, "builds_in_threads", True)
    monkeypatch.setattr(Gemm, "build", waiting)
    monkeypatch.setattr(Aten, "build", beginning)
    fast = convoy.load(deeper, plan, (X,))
    assert [step.config.engine for step in fast.plan.steps] == ["gemm", "gemm", "aten"]
    with torch.no_grad():
        assert torch.allclose(fast(X), deeper(X), atol=1e-5)


def test_kernels_of_a_first_answer_are_built_while_the_references_run(
    net: nn.Sequential, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The float64 run waits for the builds' beginning, and each kernel is built once."""
    build, plan_of, oracle, begun = Gemm.build, whole_model.make_plan, net_check.run_oracle, threading.Event()
    built: list[Problem] = []

    def beginning(engine: Gemm, problem: Problem, *rest: Any) -> object:
        built.append(problem)
        begun.set()
        return build(engine, problem, *rest)

    def waiting(*args: Any, **named: Any) -> object:
        assert begun.wait(WAIT_S)
        return oracle(*args, **named)

    monkeypatch.setattr(Gemm, "builds_in_threads", True)
    monkeypatch.setattr(Gemm, "build", beginning)
    monkeypatch.setattr(whole_model, "make_plan", lambda *args, **named: by_gemm(plan_of(*args, **named)))
    monkeypatch.setattr(net_check, "run_oracle", waiting)
    monkeypatch.setattr(end_to_end, "is_faster", lambda *_: True)
    fast = convoy.optimize(net, (X,), settings=convoy.Settings(effort="none", db=tmp_path / "perf.db"))
    assert [step.config.engine for step in fast.plan.steps].count("gemm") == len(built) == 2
    with torch.no_grad():
        assert torch.allclose(fast(X), net(X), atol=1e-5)


def test_a_search_that_measures_runs_the_references_first(
    net: nn.Sequential, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measuring needs their memory, and a graph that is wrong should be found before hours of it."""
    run, oracle = [], net_check.run_oracle

    def measuring(*_: object, **__: object) -> None:
        raise StopAsyncIteration

    monkeypatch.setattr(tune_in_time, "measure", measuring)
    monkeypatch.setattr(net_check, "run_oracle", lambda *a, **k: (run.append(a), oracle(*a, **k))[1])
    for effort, references in (("none", 0), ("quick", 1)):
        with pytest.raises(StopAsyncIteration):
            convoy.optimize(net, (X,), settings=convoy.Settings(effort=effort, db=tmp_path / "perf.db"))
        assert len(run) == references


def test_a_kernel_that_a_thread_cannot_build(net: nn.Sequential, plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build = Gemm.build

    def refuse(engine: Gemm, problem: object, *rest: object) -> object:
        if "c16" in str(problem):
            raise CompileError("gemm", "the C compiler refused the source")
        return build(engine, problem, *rest)

    monkeypatch.setattr(Gemm, "builds_in_threads", True)
    monkeypatch.setattr(Gemm, "build", refuse)
    with pytest.warns(UserWarning, match=r"convoy: PyTorch runs 1 steps, because gemm could not"):
        fast = convoy.load(net, plan, (X,))
    assert [step.config.engine for step in fast.plan.steps].count("gemm") == 1
    with torch.no_grad():
        assert torch.allclose(fast(X), net(X), atol=1e-5)


def test_nothing_is_built_in_threads_where_no_engine_allows_it(monkeypatch: pytest.MonkeyPatch, plan: Path) -> None:
    steps = [step for step in load(plan).steps if step.problem.startswith("conv")]
    wanted = [(parse_problem(step.problem), step.config) for step in steps]
    target = detect_target("cpu")
    assert in_threads(wanted, target) == {}
    monkeypatch.setattr(Gemm, "builds_in_threads", True)
    assert in_threads(wanted[:1] * 3, target) == {}  # one kernel, three times
    assert sorted(in_threads([*wanted, wanted[0]], target)) == [0, 1]


@pytest.mark.skipif(bool(absence()), reason=absence())
def test_threads_compile_the_same_machine_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc_kernel, "cached", lambda engine, key, make: make())
    problem = parse_problem("conv:fprop:n1c64h14w14k64r3s3:p1x1:s1x1:d1x1:g1:nhwc:fp16.fp16.fp16.fp32:half:bias+relu")
    engine = load_engine("cuda.swapped")
    wanted = [(problem, engine.config(knobs)) for knobs in engine.space(problem, H100)[:3]]
    made: dict[int, Any] = in_threads(wanted, H100)
    assert sorted(made) == [0, 1, 2]
    for index, (_, config) in enumerate(wanted):
        alone = engine.build(problem, config.knobs, H100)
        assert made[index].function.cubin == alone.function.cubin
    assert len({executable.function.cubin for executable in made.values()}) == 3
