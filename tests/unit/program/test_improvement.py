"""`OptimizedModule.improve`: the better program takes the place of the present one, also while calls run."""

from __future__ import annotations

import copy
import dataclasses
import threading
from typing import Any

import pytest
import torch
from torch import nn

import convoy
from convoy.capture.state.call_leftovers import CallLeftovers
from convoy.deadline import Deadline
from convoy.perfdb import Database
from convoy.pipeline import improve as improving
from convoy.pipeline.by_parts.partwise_module import OptimizedPart, PartwiseModule
from convoy.pipeline.check.end_to_end import Latency
from convoy.plan import Plan
from convoy.program import OptimizedModule, Program
from convoy.settings import Effort, Settings

X = torch.randn(1, 3, 8, 8)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return torch.relu(self.conv(x)) * scale


class Finds:
    """A tuner that finds a program with another plan, or none.

    Args:
        changes: fields of the plan that it finds; none: it finds nothing better.
    """

    def __init__(self, **changes: Any) -> None:
        self.changes = changes
        self.asked: list[tuple[tuple[Any, ...], float]] = []

    def __call__(self, *given: Any) -> Program:
        raise AssertionError(given)

    def improved(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], program: Program, time_s: float
    ) -> Program:
        del model, kwargs
        self.asked.append((args, time_s))
        changed = dataclasses.replace(program.plan, **self.changes)
        return program.with_plan(changed) if self.changes else program


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    path = tmp_path_factory.mktemp("db") / "perf.db"
    return Settings(effort=Effort.NONE, db=path, only_engines=("aten",), solver=convoy.Solver.BASELINE, isolate=False)


@pytest.fixture
def fast(settings: Settings) -> OptimizedModule:
    return convoy.optimize(Net().eval(), (X,), settings=settings)


def test_the_better_program_is_run_and_its_plan_is_shown(fast: OptimizedModule) -> None:
    wanted = fast(x=X)  # a route by name
    fast.program_cache.tuner = tuner = Finds(notes=("better",))
    plan = fast.improve(time_s=5)
    assert fast.plan is plan is fast.programs[0].plan
    assert plan.notes == ("better",)
    for route in (fast.program_cache.find((X,), {}), fast.program_cache.find((), {"x": X})):
        assert route is not None
        assert route[0].program.plan is plan
    assert torch.equal(fast(x=X), wanted)
    ((args, time_s),) = tuner.asked
    assert time_s == 5
    assert args[0].shape == X.shape
    assert args[0].std() > 0.5


def test_what_is_not_better_changes_nothing(fast: OptimizedModule) -> None:
    before = fast.programs[0]
    fast.program_cache.tuner = tuner = Finds()
    assert fast.improve(1.0, (X,)) is before.plan
    assert fast.programs[0] is before
    assert tuner.asked[0][0][0] is X


def test_calls_of_other_threads_go_on_while_a_program_is_swapped_in(fast: OptimizedModule) -> None:
    wanted, stop, wrong = fast(X), threading.Event(), list[str]()

    def call() -> None:
        while not stop.is_set():
            for made in (fast(X), fast(x=X)):
                if not torch.equal(made, wanted):
                    wrong.append("other numbers")

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    for index in range(50):
        fast.program_cache.tuner = Finds(notes=(str(index),))
        fast.improve(1.0)
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong
    assert fast.plan.notes == ("49",)
    found = fast.program_cache.find((), {"x": X})
    assert found is not None
    assert found[0].program.plan is fast.plan


def test_a_program_for_weights_that_changed_meanwhile_is_not_used(fast: OptimizedModule) -> None:
    class Changes(Finds):
        def improved(self, model: nn.Module, *rest: Any) -> Program:
            with torch.no_grad():
                next(model.parameters()).mul_(2)
            return super().improved(model, *rest)

    fast.program_cache.tuner = Changes(notes=("of the weights before",))
    fast.improve(1.0)
    assert fast.plan.notes != ("of the weights before",)


@pytest.mark.parametrize(
    ("time_s", "args", "named"),
    [
        (0, None, "time_s"),
        (float("nan"), None, "time_s"),
        (True, None, "time_s"),
        ("5", None, "time_s"),
        (1.0, "x", "args"),
        (1.0, (X[:, :, :4],), "args"),
    ],
)
def test_what_cannot_be_used_is_named(fast: OptimizedModule, time_s: Any, args: Any, named: str) -> None:
    with pytest.raises(convoy.InputError) as caught:
        fast.improve(time_s, args)
    assert caught.value.argument == named


def test_parts_are_improved_each_for_its_share_of_the_time(
    monkeypatch: pytest.MonkeyPatch, fast: OptimizedModule
) -> None:
    seen: list[tuple[OptimizedModule, float]] = []
    plan = Plan("net", "0" * 16, (), {}, "as_torch", (), "modules", baseline=True)
    parts = [OptimizedPart("conv", 0.6, fast), OptimizedPart("head", 0.2, copy.deepcopy(fast))]
    whole = PartwiseModule(Net(), Net(), parts, plan, copy.deepcopy, CallLeftovers())
    monkeypatch.setattr(OptimizedModule, "improve", lambda part, time_s: seen.append((part, time_s)))
    assert whole.improve(1.0) is plan
    assert seen == [(parts[0].program, pytest.approx(0.75)), (parts[1].program, pytest.approx(0.25))]


def test_the_search_goes_on_in_the_database(fast: OptimizedModule, settings: Settings) -> None:
    wanted = fast.model(X)
    with Database.open(settings.db, shipped=False) as database:
        before = len(database.rows())
    fast.improve(time_s=60.0)
    with Database.open(settings.db, shipped=False) as database:
        assert len(database.rows()) > before
    torch.testing.assert_close(fast(X), wanted)


def ready(runnable: object, *steps: str) -> Any:
    found = [type("Step", (), {"config": name, "results": (name,), "stream": 0}) for name in steps]
    return type("Ready", (), {"runnable": runnable, "plan": type("P", (), {"steps": found})})


def test_of_two_programs_the_one_that_wins_four_of_five_rounds_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"old": Latency("old", (10.0, 10.0, 10.0)), "new": Latency("new", (9.0, 9.0, 9.0))}
    monkeypatch.setattr(improving, "interleave", lambda runs, **_: {name: times[name] for name in runs})
    old, new, stock = ready(object(), "a"), ready(object(), "b"), ready(None)

    def kept(one: Any, other: Any) -> Any:
        return improving._faster(one, other, (), {}, Deadline(5))

    assert kept(old, new) is new
    times["new"] = Latency("new", (9.8, 9.8, 10.1))
    assert kept(old, new) is old
    times["new"] = Latency("new", (1.0, 1.0, 1.0))
    assert kept(old, ready(object(), "a")) is old  # the same steps
    assert kept(old, stock) is old
    assert kept(stock, new) is new


def test_efforts_follow_one_another_within_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("convoy.deadline._monotonic", lambda: now[0])
    asked: list[tuple[Effort, float]] = []
    program = ready(object(), "a")

    def tune(settings: Settings, deadline: Deadline) -> Any:
        asked.append((settings.effort, deadline.left_s))
        now[0] += 20.0
        return type("Result", (), {"program": type("Module", (), {"programs": [program]})})

    assert improving.improved(program, (), {}, Settings(effort=Effort.NONE), 60.0, tune) is program
    assert asked == [(Effort.QUICK, 54.0), (Effort.FULL, 36.0)]
    asked.clear()
    improving.improved(program, (), {}, Settings(effort=Effort.NONE), 25.0, tune)
    assert asked == [(Effort.QUICK, 22.5)]
    asked.clear()
    improving.improved(program, (), {}, Settings(effort=Effort.FULL), 60.0, tune)
    assert [effort for effort, _ in asked] == [Effort.FULL]
    with pytest.warns(UserWarning, match=r"took 20.0 s, longer than its limit of 15 s"):
        improving.improved(program, (), {}, Settings(effort=Effort.FULL), 15.0, tune)
