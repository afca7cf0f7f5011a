"""Where a GPU has no room for PyTorch's own beside the plan, one is gone before the other is made."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from convoy.deadline import Deadline
from convoy.pipeline.check import end_to_end_check as checks
from convoy.pipeline.check.end_to_end import Latency, OutputErrors
from convoy.pipeline.check.end_to_end_check import (
    NO_TIMELINE,
    TIMED_SEPARATELY,
    ComparedRun,
    EndToEndCheck,
    build_and_check,
    with_timeline,
)
from convoy.settings import Effort


class Program:
    """Holds the device's memory as long as it lives."""

    def __init__(self, plan: Any) -> None:
        self.plan = plan


class Crowded(EndToEndCheck):
    """There is room for a program or for PyTorch's own, unless `room` is for both."""

    cuda = True

    def __init__(self, *, room: int) -> None:
        self.room, self.programs = room, weakref.WeakSet[Program]()
        self.made: list[str] = []

    def build(self, plan: Any) -> Program:
        program = Program(plan)
        self.programs.add(program)
        return program

    def stock(self) -> ComparedRun:
        gc.collect()
        if len(self.programs) + 1 > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.made.append("stock")
        return ComparedRun("torch.graph", OutputErrors(2.0, 2.0), lambda: None)

    def ours(self, program: Any) -> ComparedRun:
        self.made.append("ours")
        return ComparedRun("convoy", OutputErrors(1.0, 1.0), lambda: program.plan)

    def context(self) -> Any:
        return nullcontext()


class Plan(SimpleNamespace):
    """As much of a plan as is looked at."""


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        checks, "interleave", lambda runs, **_: {name: Latency(name, (float(len(runs)),)) for name in runs}
    )
    monkeypatch.setattr(checks.dataclasses, "replace", lambda plan, **changes: Plan(**{**vars(plan), **changes}))


@pytest.mark.parametrize(("room", "times", "note"), [(2, 2.0, ()), (1, 1.0, (TIMED_SEPARATELY,))])
def test_both_are_timed_in_turn_or_one_by_one(room: int, times: float, note: tuple[str, ...]) -> None:
    check = Crowded(room=room)

    def build() -> Any:
        plan = Plan(notes=())
        return plan, check.build(plan)

    plan, program, outcome = build_and_check(check, build, check.build)  # type: ignore[arg-type]
    assert plan.notes == note
    assert program.plan.notes == note
    assert list(check.programs) == [program]
    assert (outcome.baseline, outcome.optimized) == (Latency("torch.graph", (times,)), Latency("convoy", (times,)))
    assert (outcome.errors, outcome.baseline_errors) == (OutputErrors(1.0, 1.0), OutputErrors(2.0, 2.0))
    assert check.made == (["stock", "ours"] if room == 2 else ["ours", "stock"])


def test_no_room_for_pytorchs_own_alone_is_an_error() -> None:
    check = Crowded(room=0)
    plan = Plan(notes=())
    with pytest.raises(torch.OutOfMemoryError):
        build_and_check(check, lambda: (plan, check.build(plan)), check.build)  # type: ignore[arg-type, return-value]


def test_other_errors_are_not_taken_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Crowded) -> ComparedRun:
        raise RuntimeError("no such algorithm")

    monkeypatch.setattr(Crowded, "stock", broken)
    with pytest.raises(RuntimeError, match="no such algorithm"):
        Crowded(room=2).both(Program(None))  # type: ignore[arg-type]


class Noting(SimpleNamespace):
    """As much of a program as a timeline needs."""

    def __init__(self, plan: Any, runnable: Any) -> None:
        super().__init__(plan=plan, runnable=runnable)

    def with_plan(self, plan: Any) -> Any:
        return Noting(plan, self.runnable)


@pytest.mark.parametrize(
    ("error", "raised"), [(torch.OutOfMemoryError("CUDA out of memory"), False), (KeyError("x"), True)]
)
def test_without_room_for_another_run_there_is_no_timeline(
    monkeypatch: pytest.MonkeyPatch, error: Exception, raised: bool
) -> None:
    def run(program: Any, inputs: Any, **_: Any) -> Any:
        raise error

    monkeypatch.setattr(checks, "eager_of", lambda runnable: runnable)
    monkeypatch.setattr(checks, "measure_timeline", run)
    plan = Plan(notes=("first",))
    program = Noting(plan, object())
    if raised:
        with pytest.raises(KeyError):
            with_timeline(program, [])  # type: ignore[arg-type]
        return
    noted, spans = with_timeline(program, [])  # type: ignore[arg-type]
    assert (noted.plan.notes, spans) == (("first", NO_TIMELINE), [])
    assert program.plan is plan


def test_a_baseline_has_no_timeline() -> None:
    program = Noting(Plan(notes=()), None)
    assert with_timeline(program, []) == (program, [])  # type: ignore[arg-type]


@pytest.mark.parametrize(("left_s", "rounds"), [(100.0, 5), (6.5, 1), (0.5, 0)])
def test_a_timeline_takes_no_longer_than_the_time_left(
    monkeypatch: pytest.MonkeyPatch, left_s: float, rounds: int
) -> None:
    """One run takes a second."""
    seen: list[int] = []

    def run(program: Any, inputs: Any, rounds: int) -> Any:
        seen.append(rounds)
        return []

    monkeypatch.setattr(checks, "eager_of", lambda runnable: runnable)
    monkeypatch.setattr(checks, "measure_timeline", run)
    deadline = Deadline(left_s, lambda: 0.0)
    with_timeline(Noting(Plan(notes=()), object()), [], Effort.QUICK, deadline, 1.0)  # type: ignore[arg-type]
    assert seen == ([rounds] if rounds else [])
