"""Tuning within a time: what is measured when, and which answer is kept."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import convoy
from convoy.deadline import Deadline
from convoy.engines.competition import competing_engines
from convoy.pipeline import optimize_model, tune_in_time
from convoy.pipeline.check.end_to_end import Latency, OutputErrors, interleave
from convoy.pipeline.check.verify_predicted import BuiltPlan
from convoy.pipeline.summarize import CheckOutcome
from convoy.pipeline.tune_in_time import OTHERS_S, WHOLE_SHARE
from convoy.plan import Plan
from convoy.program import Program
from convoy.settings import Effort, Settings
from convoy.tune import SearchResult

EXACT = OutputErrors(0.0, 0.0)
ON_CPU: Any = SimpleNamespace(target=SimpleNamespace(device="cpu"))
"""As much of a net as is looked at."""


class Stages:
    """Stands in for measuring and building; each takes time on a clock of its own.

    Args:
        monkeypatch: puts it in the place of the stages.
        time_s: of the call.
        first_ms: time of the plan that is made from predictions; PyTorch takes 10 ms.
        second_ms: of the plan that is made from measurements.
        build_s: what selecting, building and checking take.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        time_s: float,
        first_ms: float = 8.0,
        second_ms: float = 5.0,
        build_s: float = 2.0,
    ) -> None:
        self.now = 0.0
        self.times_ms = {Effort.NONE: first_ms, Effort.QUICK: second_ms}
        self.build_s = build_s
        self.wrong: dict[Effort, str] = {}
        self.searched: list[tuple[Effort, float]] = []
        self.lines: list[str] = []
        self.messages: list[str] = []
        self.interrupt: Callable[[Effort], None] = lambda effort: None
        self.deadline = Deadline(time_s, lambda: self.now)
        monkeypatch.setattr(tune_in_time, "measure", self._measure)

    def _measure(self, net: Any, settings: Settings, database: Any, watch: Any, *, deadline: Deadline) -> SearchResult:
        del net, database
        watch("a layer", 1, 2)
        self.searched.append((settings.effort, deadline.left_s))
        if settings.effort is Effort.NONE:
            self.now += 1.0
            return SearchResult(rows={"a": ()}, predicted=1)
        self.interrupt(settings.effort)
        self.now += min(deadline.left_s, 100.0)
        return SearchResult(rows={"a": ()}, measured=3, cut="after a while" if deadline.is_limited else "")

    def _build(self, found: SearchResult, settings: Settings, deadline: Deadline) -> BuiltPlan:
        assert deadline is self.deadline
        tuned_s = self.now
        self.now += self.build_s
        notes = tuple(tune_in_time.prediction_notes(found))
        plan = Plan("net", "0" * 16, (), {}, "as_torch", (), "exact", notes=notes)
        took = self.times_ms[settings.effort]
        outcome = CheckOutcome(Latency("torch.eager", (10.0,)), Latency("convoy", (took,)), EXACT, EXACT)
        wrong = self.wrong.get(settings.effort, "")
        return BuiltPlan(None, plan, Program(plan, None, None), outcome, wrong, tuned_s)  # type: ignore[arg-type]

    def announce(self, line: str) -> None:
        self.lines.append(line)

    def __call__(self, message: str, done: int, total: int) -> None:
        assert (done, total) == (1, 2)
        self.messages.append(message)

    def run(self, effort: Effort = Effort.QUICK) -> tune_in_time.TunedPlan:
        settings = Settings(effort=effort, time_s=self.deadline.seconds)
        return tune_in_time.tune_in_time(ON_CPU, settings, None, self, self.deadline, self._build)  # type: ignore[arg-type]


def time_of(tuned: tune_in_time.TunedPlan) -> float:
    return tuned.built.outcome.optimized.median_ms


def test_the_first_answer_comes_first_and_the_search_leaves_time_to_build(monkeypatch: pytest.MonkeyPatch) -> None:
    stages = Stages(monkeypatch, 30.0)
    assert time_of(stages.run()) == 5.0
    assert stages.searched == [(Effort.NONE, 30.0), (Effort.QUICK, 30.0 - 3.0 - 1.25 * 3.0 - OTHERS_S["cpu"])]
    assert stages.now <= 30.0
    assert stages.lines == ["first answer after 3.0 s: 1.25 times as fast as PyTorch (8 ms, PyTorch 10 ms)"]
    assert stages.messages == ["a layer", "1.25x so far, 27 s left: a layer"]


@pytest.mark.parametrize(("more_s", "kept_s"), [(0.1, OTHERS_S["cpu"]), (-0.1, 0.0)])
def test_other_selections_are_timed_where_that_leaves_enough_for_measuring(
    monkeypatch: pytest.MonkeyPatch, more_s: float, kept_s: float
) -> None:
    time_s = 3.0 + 1.25 * 3.0 + WHOLE_SHARE * OTHERS_S["cpu"] + more_s
    stages = Stages(monkeypatch, time_s)
    stages.run()
    assert stages.searched[1][1] == pytest.approx(time_s - 3.0 - 1.25 * 3.0 - kept_s)


def test_what_turns_out_slower_or_wrong_does_not_replace_the_first_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    slower = Stages(monkeypatch, 30.0, second_ms=9.0).run()
    assert time_of(slower) == 8.0
    stages = Stages(monkeypatch, 30.0)
    stages.wrong[Effort.QUICK] = "off by much"
    wrong = stages.run()
    assert time_of(wrong) == 8.0
    for kept, why in ((slower, "is slower"), (wrong, "gives wrong results")):
        notes = " ".join(kept.built.plan.notes)
        assert f"the plan of the 3 candidates that were measured afterwards {why}" in notes
        assert "effort none" not in notes
        assert kept.found.measured == 3
        assert kept.built.tuned_s > 20  # of 30: these were measured meanwhile


def test_where_no_time_is_left_the_first_answer_says_why_nothing_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    stages = Stages(monkeypatch, 5.0)
    tuned = stages.run()
    assert [effort for effort, _ in stages.searched] == [Effort.NONE]
    assert any(
        "measuring ended after 3 of 5 s, before anything was measured" in note for note in tuned.built.plan.notes
    )
    assert not any("effort none" in note for note in tuned.built.plan.notes)
    assert tuned.built.program.plan is tuned.built.plan
    assert tune_in_time.overrun_note(stages.deadline, 0) == ""


@pytest.mark.parametrize(("effort", "time_s"), [(Effort.QUICK, float("inf")), (Effort.NONE, 30.0)])
def test_without_a_limit_or_measurements_there_is_one_answer(
    monkeypatch: pytest.MonkeyPatch, effort: Effort, time_s: float
) -> None:
    stages = Stages(monkeypatch, time_s)
    stages.run(effort)
    assert [each for each, _ in stages.searched] == [effort]
    assert stages.lines == []


def test_an_interrupt_gives_the_first_answer_only_if_the_time_was_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    stages = Stages(monkeypatch, 30.0)

    def press(effort: Effort) -> None:
        del effort
        raise KeyboardInterrupt

    stages.interrupt = press
    with pytest.raises(KeyboardInterrupt):
        stages.run()
    stages = Stages(monkeypatch, 30.0)

    def stop(effort: Effort) -> None:
        stages.deadline.stop()
        press(effort)

    stages.interrupt = stop
    assert time_of(stages.run()) == 8.0


def test_a_second_program_that_does_not_fit_leaves_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    stages = Stages(monkeypatch, 30.0)

    def fill(effort: Effort) -> None:
        raise torch.OutOfMemoryError(str(effort))

    stages.interrupt = fill
    assert time_of(stages.run()) == 8.0


def test_an_overrun_is_reported_with_its_cause() -> None:
    now = [0.0]
    call = Deadline(2, lambda: now[0])
    now[0] = 2.1
    assert tune_in_time.overrun_note(call, 0) == ""
    now[0] = 4.0
    assert tune_in_time.overrun_note(call, 0) == (
        "the call took 4.0 s, longer than its limit of 2 s (time_s): a first answer takes as long here"
    )
    assert "building and checking" in tune_in_time.overrun_note(call, 3)
    assert tune_in_time.overrun_note(Deadline(), 0) == ""


def test_timing_ends_when_its_time_is_up_but_not_before_there_is_a_median(monkeypatch: pytest.MonkeyPatch) -> None:
    now, runs = [0.0], {"a": 0, "b": 0}
    monkeypatch.setattr("convoy.pipeline.check.end_to_end.time.perf_counter", lambda: now[0])

    def run(name: str) -> Callable[[], None]:
        def once() -> None:
            runs[name] += 1
            now[0] += 1.0

        return once

    timed = interleave({name: run(name) for name in runs}, cuda=False, rounds=15, most_s=0.0)
    assert timed["a"].median_ms == 1000.0
    assert runs == {"a": 2 + 3, "b": 2 + 3}  # two to see how long one takes, then three rounds


def test_a_time_that_no_answer_can_keep_is_reported(tmp_path: Any) -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval()
    settings = Settings(time_s=1e-3, db=tmp_path / "perf.db", only_engines=("aten",))
    with pytest.warns(
        UserWarning, match=r"longer than its limit of 0.001 s \(time_s\): a first answer takes as long here"
    ):
        found = optimize_model(net, (torch.randn(1, 3, 8, 8),), settings=settings)
    assert found.summary.tuning.measured == 0
    assert any("before anything was measured" in note for note in found.plan.notes)


def test_a_training_step_has_its_time_too(tmp_path: Any) -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 36, 2))
    batch = (torch.randn(2, 3, 8, 8), torch.tensor([0, 1]))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    settings = Settings(time_s=1e-3, db=tmp_path / "perf.db", only_engines=("aten",))
    with pytest.warns(UserWarning, match=r"longer than its limit of 0.001 s"):
        step = convoy.training_step(net, nn.functional.cross_entropy, optimizer, batch, settings=settings)
    assert torch.isfinite(step(*batch))


def test_engines_that_build_long_do_not_compete_in_a_short_call() -> None:
    assert "inductor.whole" in tune_in_time.without_slow_builds(Settings()).deny_engines
    only = tune_in_time.without_slow_builds(Settings(only_engines=("aten", "inductor.whole")))
    assert only.only_engines == ("aten",)
    assert competing_engines(tune_in_time.without_slow_builds(Settings(only_engines=("inductor.whole",)))) == ["aten"]
    plain = Settings(only_engines=("aten",))
    assert tune_in_time.without_slow_builds(plain) is plain
