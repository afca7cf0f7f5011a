"""A first answer's plan is made beside the references: same plan, same state, same errors, and nothing is timed meanwhile."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import convoy
from convoy.engines.algorithms.gemm import Gemm
from convoy.errors import SelectionError
from convoy.measurement import ChildRunner, Peaks
from convoy.perfdb import Database
from convoy.perfdb.shipped import shipped_folder
from convoy.pipeline import select, tune_in_time, whole_model
from convoy.pipeline.captured_net import captured_net
from convoy.pipeline.check import end_to_end, end_to_end_check, net_check
from convoy.pipeline.check.plan_ahead import PlanAhead, PlannedNet, plans_ahead
from convoy.pipeline.isolation import isolate, preserve_global_state
from convoy.plan import Plan
from convoy.settings import Settings
from convoy.target import Target
from convoy.tune import SearchResult
from tests.unit.program.test_compiler_faults import by_gemm

WAIT_S = 60.0
H100 = Target("cuda", "an H100 that is not there", "sm_90", 132, 80 << 30, 50 << 20)
CPU = Target("cpu", "a CPU", "avx2", 2, 1 << 30, 1 << 20)
PEAKS = Peaks(3e12, {"fp32": 5e13, "tf32": 4e14, "fp16": 7e14, "bf16": 7e14}, 6e12, 50 << 20)
X = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    """Notes the thread and the modes of every call."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 4, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


@pytest.fixture
def threaded(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Makes plans beside the references, or not, on this CPU too; a plan is always faster."""

    def set_to(wanted: bool) -> None:
        monkeypatch.setattr(whole_model, "plans_ahead", lambda *_: wanted)

    monkeypatch.setattr(end_to_end, "is_faster", lambda *_: True)
    set_to(True)
    return set_to


def first_answer(db: Path, **named: Any) -> convoy.OptimizedModule:
    return convoy.optimize(Net().eval(), (X,), settings=convoy.Settings(effort="none", db=db / "perf.db", **named))


def without_times(plan: Plan) -> tuple[object, ...]:
    notes = [note for note in plan.notes if " ms" not in note]
    return plan.steps, plan.total_us, plan.bound_us, plan.solver, plan.graph_digest, notes, plan.target, plan.numerics


def test_plan_errors_and_outputs_are_those_without_a_thread(
    threaded: Callable[[bool], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[object, ...]] = []
    oracle = net_check.run_oracle
    for wanted in (True, False):
        threaded(wanted)
        found: list[Any] = []
        monkeypatch.setattr(net_check, "run_oracle", lambda *a, to=found, **k: (to.append(oracle(*a, **k)), to[-1])[1])
        folder = tmp_path / str(wanted)
        folder.mkdir()
        fast = first_answer(folder)
        with torch.no_grad():
            outputs = fast(X).numpy().tobytes()
        exact = [tensor.numpy().tobytes() for tensor in found[0].exact]
        made.append((without_times(fast.plan), outputs, exact, found[0].baseline))
    assert made[0] == made[1]


def test_references_and_search_run_at_once_and_builds_begin_before_the_references_end(
    threaded: Callable[[bool], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model runs in the calling thread; each side waits for the other's beginning."""
    del threaded
    both, built = threading.Barrier(2), threading.Event()
    threads: dict[str, int] = {}
    oracle, measure, plan_of, build = net_check.run_oracle, tune_in_time.measure, whole_model.make_plan, Gemm.build

    def references(*args: Any, **named: Any) -> Any:
        threads["references"] = threading.get_ident()
        both.wait(WAIT_S)
        assert built.wait(WAIT_S)
        return oracle(*args, **named)

    def measuring(*args: Any, **named: Any) -> Any:
        threads["search"] = threading.get_ident()
        both.wait(WAIT_S)
        return measure(*args, **named)

    def building(*args: Any) -> Any:
        built.set()
        return build(*args)

    monkeypatch.setattr(net_check, "run_oracle", references)
    monkeypatch.setattr(tune_in_time, "measure", measuring)
    monkeypatch.setattr(whole_model, "make_plan", lambda *args, **named: by_gemm(plan_of(*args, **named)))
    monkeypatch.setattr(Gemm, "builds_in_threads", True)
    monkeypatch.setattr(Gemm, "build", building)
    fast = first_answer(tmp_path)
    assert threads["references"] == threading.get_ident() != threads["search"]
    assert [step.config.engine for step in fast.plan.steps].count("gemm") == 2
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("convoy-plan")]


def test_nothing_is_timed_while_a_reference_runs(
    threaded: Callable[[bool], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor while the plan is made: a call with a time limit answers first, and then measures."""
    del threaded
    running: set[str] = set()
    timed: list[str] = []

    def noted(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **named: Any) -> Any:
            running.add(name)
            try:
                return work(*args, **named)
            finally:
                running.discard(name)

        return run

    def timing(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **named: Any) -> Any:
            assert not running
            timed.append(name)
            return work(*args, **named)

        return run

    first = tune_in_time.measure

    def measure(net: Any, settings: Settings, *rest: Any, **named: Any) -> Any:
        work = noted("plan", first) if settings.effort == "none" else first
        return work(net, settings, *rest, **named)

    monkeypatch.setattr(tune_in_time, "measure", measure)
    monkeypatch.setattr(net_check, "run_oracle", noted("references", net_check.run_oracle))
    monkeypatch.setattr(whole_model, "select", noted("select", select.select))
    monkeypatch.setattr(end_to_end_check, "interleave", timing("whole", end_to_end.interleave))
    monkeypatch.setattr(ChildRunner, "measure", timing("candidate", ChildRunner.measure))
    monkeypatch.setattr(whole_model, "ceilings_of", lambda *_: Peaks(1e10, {"fp32": 1e11}, 2e10, 1 << 20))
    settings = convoy.Settings(effort="quick", time_s=50, only_engines=("gemm",), db=tmp_path / "perf.db")
    convoy.optimize(Net().eval(), (X,), settings=settings)
    assert timed[0] == "whole"
    assert "candidate" in timed


class Watched(Net):
    """Draws random numbers and notes the modes that it runs in."""

    seen: list[tuple[object, ...]]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        modes = torch.is_autocast_enabled("cpu"), torch.is_inference_mode_enabled(), threading.get_ident()
        type(self).seen.append(modes)
        return super().forward(x)


def test_flags_modes_and_random_states_are_kept(threaded: Callable[[bool], None], tmp_path: Path) -> None:
    """Autocast and inference mode belong to a thread: the model finds those that the user has set."""
    seen: list[set[tuple[object, ...]]] = []
    for wanted in (True, False):
        threaded(wanted)
        Watched.seen = []
        torch.manual_seed(5)
        random.seed(5)
        benchmark = torch.backends.cudnn.benchmark
        folder = tmp_path / str(wanted)
        folder.mkdir()
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode():
            settings = convoy.Settings(effort="none", only_engines=("aten",), db=folder / "perf.db")
            convoy.optimize(Watched().eval(), (X,), settings=settings)
            assert torch.is_autocast_enabled("cpu")
            assert torch.is_inference_mode_enabled()
        torch.manual_seed(5)
        before = torch.get_rng_state(), random.getstate()
        convoy.optimize(Net().eval(), (X,), settings=settings)
        torch.manual_seed(5)  # `Net` draws its weights
        assert torch.equal(torch.get_rng_state(), before[0])
        assert random.getstate() == before[1]
        assert torch.backends.cudnn.benchmark == benchmark
        assert torch.is_grad_enabled()
        seen.append(set(Watched.seen))
    assert seen[0] == seen[1]
    assert {modes[2] for modes in seen[0]} == {threading.get_ident()}


def test_an_h100s_plan_is_the_same_in_a_thread(tmp_path: Path) -> None:
    """Predicted from the rows that ship, without the device."""
    (path,) = (each for each in shipped_folder().iterdir() if each.name == "0ec5093154215ec4.target.json")
    target = Target.from_dict(json.loads(path.read_text()))
    settings = convoy.Settings(effort="none", db=tmp_path / "perf.db")
    with preserve_global_state(), Database.open(settings.db) as database:
        net = captured_net("net", isolate(Net().eval(), (X,), {}), settings, target)
        net = replace(net, original=None, ceilings=PEAKS)

        def made(found: SearchResult, settings: Settings) -> PlannedNet:
            choice = select.select(net, found, settings)
            return PlannedNet(choice, select.make_plan(net, choice, settings, found=found), 0.0, {}, ExitStack())

        def search() -> SearchResult:
            return tune_in_time.measure(net, settings, database, lambda *_: None)

        here = made(search(), settings)
        ahead = PlanAhead(made, lambda: None)
        there = ahead.take(ahead.searched(search, settings))
    assert there is not None
    assert (there.plan, there.choice) == (here.plan, here.choice)
    assert any(step.config.engine.startswith(("cuda.", "triton.")) for step in there.plan.steps)


def planned(_: object = None, __: object = None, closing: Callable[[], object] = lambda: None) -> PlannedNet:
    building = ExitStack()
    building.callback(closing)
    return PlannedNet(None, None, 0.0, {}, building)  # type: ignore[arg-type]


def fail(error: BaseException) -> Callable[..., Any]:
    def raise_it(*_: object, **__: object) -> Any:
        raise error

    return raise_it


def test_the_plan_is_handed_out_once_for_its_own_result() -> None:
    found = SearchResult()
    ahead = PlanAhead(planned, lambda: None)
    assert ahead.searched(lambda: found, Settings()) is found
    assert ahead.take(found) is not None
    assert ahead.take(found) is None
    ahead.searched(lambda: found, Settings())
    assert ahead.take(SearchResult()) is None


@pytest.mark.parametrize("error", [KeyError("stock"), KeyboardInterrupt()])
def test_what_the_references_raise_ends_the_builds(error: BaseException) -> None:
    closed: list[int] = []
    ahead = PlanAhead(lambda *_: planned(closing=lambda: closed.append(1)), fail(error))
    with pytest.raises(type(error)) as raised:
        ahead.searched(SearchResult, Settings())
    assert raised.value is error
    assert closed == [1]


def test_what_the_search_raises_comes_first() -> None:
    """As without a thread, where the references have not begun then."""
    error = SelectionError("no engine")
    for references in (lambda: None, fail(KeyError("stock"))):
        with pytest.raises(SelectionError) as raised:
            PlanAhead(planned, references).searched(fail(error), Settings())
        assert raised.value is error
        with pytest.raises(SelectionError):
            PlanAhead(fail(error), references).searched(SearchResult, Settings())


def test_an_error_of_the_model_arrives_as_without_a_thread(
    threaded: Callable[[bool], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(net_check, "run_oracle", fail(ZeroDivisionError("the model's own")))
    said: list[tuple[type[BaseException], str]] = []
    for wanted in (True, False):
        threaded(wanted)
        with pytest.raises(ZeroDivisionError) as raised:
            first_answer(tmp_path)
        said.append((raised.type, str(raised.value)))
    assert said[0] == said[1]


def test_where_a_plan_is_made_ahead() -> None:
    assert plans_ahead(H100, Settings(), PEAKS)
    assert not plans_ahead(CPU, Settings(), PEAKS)
    assert not plans_ahead(H100, Settings(engines=("mine=module:Mine",)), PEAKS)
    assert not plans_ahead(H100, Settings(tuning_memory_bytes=8 << 30), PEAKS)
    assert not plans_ahead(H100, Settings(), None)
