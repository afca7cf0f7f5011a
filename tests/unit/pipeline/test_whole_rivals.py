"""The net as one program beside the selected plan: planted times decide which of them runs, and the plan says so."""

from __future__ import annotations

import math
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import convoy
from convoy.pipeline.check.end_to_end import Latency, OutputErrors, TimingLimits
from convoy.pipeline.check.end_to_end_check import ComparedRun, EndToEndCheck
from convoy.pipeline.check.verify_predicted import BuiltPlan
from convoy.pipeline.rivals import whole_rivals
from convoy.pipeline.rivals.whole_rivals import Rival, fastest_of
from convoy.pipeline.select import Choice
from convoy.pipeline.summarize import CheckOutcome
from convoy.plan import Plan, Step
from convoy.problem import EngineConfig

RIGHT = OutputErrors(1e-7, 1e-7)


class Program:
    """Takes a planted time."""

    def __init__(self, plan: Plan, ms: float, errors: OutputErrors = RIGHT) -> None:
        self.plan, self.ms, self.errors = plan, ms, errors

    def with_plan(self, plan: Plan) -> Program:
        return Program(plan, self.ms, self.errors)


class Check(EndToEndCheck):
    """Names each run by its time; PyTorch's own takes 10 ms."""

    cuda = False

    def stock(self) -> ComparedRun:
        return ComparedRun("torch.eager", RIGHT, lambda: 10.0)

    def ours(self, program: Any) -> ComparedRun:
        return ComparedRun("convoy", program.errors, lambda: program.ms)

    def context(self) -> Any:
        return nullcontext()


def planted(runs: dict[str, Any], **_: Any) -> dict[str, Latency]:
    return {name: Latency(name, (run(),)) for name, run in runs.items()}


def plan(engine: str, layout: str = "nhwc") -> Plan:
    step = Step("region", "whole", ("a", "b"), ("x",), ("y",), "key", EngineConfig(engine), layout)
    return Plan("net", "digest", ("fp32[1]",), {}, "as_torch", (step,), "exact")


def chosen(
    monkeypatch: pytest.MonkeyPatch, rivals: dict[str, Program], selected_ms: float = 2.0, left_s: float = 100.0
) -> BuiltPlan:
    """The plan that runs after a selected plan of `selected_ms` met rivals, by engine."""
    monkeypatch.setattr(
        whole_rivals, "_built", lambda plan, net, settings, stage: rivals.get(plan.steps[0].config.engine)
    )
    monkeypatch.setattr("convoy.pipeline.check.end_to_end_check.interleave", planted)
    outcome = CheckOutcome(Latency("torch.eager", (10.0,)), Latency("convoy", (selected_ms,)), RIGHT, RIGHT)
    nothing: Any = None
    choice = Choice(nothing, nothing, {})
    first: Any = Program(plan("cudnn"), selected_ms)
    built = BuiltPlan(choice, first.plan, first, outcome, "", 0.0)
    offered = [Rival(choice, plan(engine)) for engine in rivals]
    net: Any = SimpleNamespace(captured=SimpleNamespace(graph=None))
    return fastest_of(built, offered, Check(), net, convoy.Settings(), lambda: TimingLimits(5, left_s), planted)


def test_a_slow_cover_gives_way_to_the_whole_net(monkeypatch: pytest.MonkeyPatch) -> None:
    rivals = {"aten": Program(plan("aten"), 3.0), "inductor.whole": Program(plan("inductor.whole"), 1.0)}
    built = chosen(monkeypatch, rivals)
    assert built.plan.steps[0].config.engine == "inductor.whole"
    assert (built.outcome.optimized.median_ms, built.outcome.baseline.median_ms) == (1.0, 10.0)
    (note,) = built.plan.notes
    assert (
        note == "the whole net by one engine, ms: aten nhwc 3.000, inductor.whole nhwc 1.000; as selected 2.000:"
        " inductor.whole nhwc runs"
    )
    assert built.program.plan == built.plan


@pytest.mark.parametrize(
    "rival",
    [
        Program(plan("inductor.whole"), 2.5),
        Program(plan("inductor.whole"), 1.995),  # not by more than the spread
        Program(plan("inductor.whole"), 1.97),  # a tie, and it takes seconds to load
        Program(plan("inductor.whole"), 1.0, OutputErrors(0.1, 0.1)),  # fast and wrong
    ],
)
def test_a_fast_cover_stays_and_its_plan_tells_the_times(monkeypatch: pytest.MonkeyPatch, rival: Program) -> None:
    built = chosen(monkeypatch, {"inductor.whole": rival})
    assert built.plan.steps[0].config.engine == "cudnn"
    assert built.plan.notes == (
        f"the whole net by one engine, ms: inductor.whole nhwc {rival.ms:.3f}; as selected 2.000",
    )


def test_what_loads_at_once_need_only_win_by_more_than_the_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(monkeypatch, {"aten": Program(plan("aten"), 1.97)}).plan.steps[0].config.engine == "aten"


def test_what_cannot_be_built_or_takes_too_long_to_build_is_no_rival(monkeypatch: pytest.MonkeyPatch) -> None:
    none: Any = None
    assert not chosen(monkeypatch, {"inductor.whole": none}).plan.notes
    assert not chosen(monkeypatch, {"inductor.whole": Program(plan("inductor.whole"), 1.0)}, left_s=0.5).plan.notes


def test_at_effort_none_a_net_is_timed_in_pytorchs_other_memory_format_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(whole_rivals, "FASTER_ON_A_CPU", math.inf)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1)).eval()
    x = torch.randn(1, 3, 32, 32)
    settings = convoy.Settings(effort="none", only_engines=("aten",), db=tmp_path / "p.db")
    fast = convoy.optimize(model, (x,), settings=settings)
    (note,) = [note for note in fast.plan.notes if note.startswith("the whole net by one engine")]
    assert "aten nhwc" in note
    torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-4)
