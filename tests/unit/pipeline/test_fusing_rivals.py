"""Other selections on a CPU: found by other times for launches of several layers, timed in turn, kept where they are faster."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from convoy.engines.compilers import host_compiler
from convoy.pipeline import net, optimize_model
from convoy.pipeline.check.end_to_end import Latency
from convoy.pipeline.rivals import fusing_rivals, whole_rivals
from convoy.pipeline.rivals.fusing_rivals import FACTORS, FUSING
from convoy.pipeline.rivals.fusing_rivals import fusing_rivals as rivals_of
from convoy.pipeline.select import Choice
from convoy.problem import EngineConfig
from convoy.selection import Candidate, SelectionProblem, solve
from convoy.selection.problem import RegionNodes
from convoy.settings import Settings
from tests.unit.pipeline.untimed import keep_plans

MORE, FEWER = FACTORS


def candidate(region: int, engine: str, median_us: float) -> Candidate:
    return Candidate(region, f"p{region}", EngineConfig(engine), "nhwc", median_us, baseline=engine == "aten")


def choice_of(together_us: float, engine: str = "cpu.banded", pattern: str = "banded") -> Choice:
    """Two layers of 10 us each, and both in one launch."""
    regions = (
        RegionNodes("conv(a)", ("a",), ("x",), ("va",)), RegionNodes("conv(b)", ("b",), ("va",), ("vb",)),
        RegionNodes(f"{pattern}(a+b)", ("a", "b"), ("x",), ("vb",)),
    )  # fmt: skip
    candidates = (
        candidate(0, "cpu.direct", 10.0), candidate(1, "cpu.direct", 10.0), candidate(2, engine, together_us),
        candidate(0, "aten", 400.0), candidate(1, "aten", 400.0),
    )  # fmt: skip
    layouts = dict.fromkeys(("x", "va", "vb"), ("nhwc",))
    problem = SelectionProblem(("a", "b"), ("x",), ("vb",), regions, candidates, layouts, dict.fromkeys(layouts, 4), {})
    return Choice(problem, solve(problem, "exact"), {})


def others(choice: Choice, monkeypatch: pytest.MonkeyPatch, device: str = "cpu", **settings: Any) -> dict[str, Choice]:
    monkeypatch.setattr(fusing_rivals, "make_plan", lambda *_: None)
    fake: Any = SimpleNamespace(target=SimpleNamespace(device=device), regions=choice.problem.regions)
    built: Any = SimpleNamespace(choice=choice, wrong="")
    return {rival.name: rival.choice for rival in rivals_of(fake, fake, built, Settings(**settings))}


@pytest.mark.parametrize(("together_us", "expected"), [(21.0, [MORE]), (19.0, [FEWER]), (40.0, []), (5.0, [])])
def test_a_selection_that_other_times_give_is_offered_with_the_measured_ones(
    monkeypatch: pytest.MonkeyPatch, together_us: float, expected: list[str]
) -> None:
    found = others(choice_of(together_us), monkeypatch)
    assert [*found] == expected
    for name, choice in found.items():
        assert choice.selection.total_us == (together_us if name == MORE else 20.0)
        assert sum(one.median_us for one in choice.selection.chosen) == choice.selection.total_us


def test_there_are_none_where_nothing_was_measured_or_another_solver_was_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    choice = choice_of(21.0)
    assert others(choice, monkeypatch)
    assert not others(choice, monkeypatch, "cuda")
    assert not others(choice, monkeypatch, effort="none")
    assert not others(choice, monkeypatch, solver="greedy")


def test_no_compiler_is_started_that_the_plan_does_without(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not others(choice_of(21.0, "inductor", "fused"), monkeypatch)
    assert not others(choice_of(21.0, pattern="glue"), monkeypatch)


@pytest.mark.parametrize(
    ("ours", "theirs", "faster"),
    [
        ((1.0, 2.0, 3.0), (1.1, 2.2, 3.3), True),
        ((1.0, 9.0, 1.0), (1.1, 2.0, 1.1), True),  # one disturbed round
        ((1.0, 1.0, 1.0), (1.005, 1.005, 1.005), False),  # a tie
        ((1.0, 9.0, 9.0), (1.1, 2.0, 2.0), False),
    ],
)
def test_the_median_of_rounds_decides(ours: tuple[float, ...], theirs: tuple[float, ...], *, faster: bool) -> None:
    nothing: Any = None
    assert FUSING.wins(nothing, Latency("a", ours), Latency("b", theirs), Settings()) is faster


class Block(nn.Module):
    """An inverted residual."""

    def __init__(self) -> None:
        super().__init__()
        self.widen, self.narrow = nn.Conv2d(8, 48, 1), nn.Conv2d(48, 8, 1)
        self.filter = nn.Conv2d(48, 48, 3, padding=1, groups=48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[n, 8, h, w] to the same."""
        return x + self.narrow(torch.relu(self.filter(torch.relu(self.widen(x)))))


@pytest.mark.skipif(not host_compiler.compiler_support(), reason="needs a C compiler")
@pytest.mark.parametrize("wins", [True, False])
def test_the_selection_that_is_faster_as_a_whole_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, wins: bool
) -> None:
    keep_plans(monkeypatch)
    monkeypatch.setattr(net, "LEAST_INSIDE", 1)
    monkeypatch.setattr(
        fusing_rivals, "FACTORS", {"other": 1e3, "another": 1e-3}
    )  # whatever was measured, one of them differs

    def times(_built: Any, programs: dict[str, Any], *_: Any) -> dict[str, Latency]:
        return {"as selected": Latency("", (2.0,)), **{name: Latency("", (1.0 if wins else 3.0,)) for name in programs}}

    monkeypatch.setattr(whole_rivals, "_times", times)
    torch.manual_seed(1)
    model, x = Block().eval(), torch.randn(2, 8, 9, 10).contiguous(memory_format=torch.channels_last)
    engines = ("cpu.banded", "cpu.direct", "cpu.depthwise")
    settings = Settings(db=tmp_path / "perf.db", isolate=False, only_engines=engines, layout="nhwc")
    result = optimize_model(model, (x,), name="block", settings=settings)
    (note,) = [note for note in result.plan.notes if note.startswith("other selections, ms: ")]
    assert note.endswith(" runs") is wins
    with torch.no_grad():
        torch.testing.assert_close(result.program(x), model(x), rtol=1e-4, atol=1e-5)
