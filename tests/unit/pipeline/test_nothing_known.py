"""Effort none on an empty database: lower limits that are marked, a note that says so and what to run, no invented speed-ups."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import convoy
from convoy import plan as plans
from convoy.measurement import Peaks, peaks
from convoy.pipeline import OptimizeResult, ceilings, optimize_model
from convoy.pipeline.captured_net import captured_net
from convoy.pipeline.ceilings import problem_floor
from convoy.pipeline.isolation import isolate
from convoy.pipeline.measure_net import NOTHING_KNOWN, prediction_notes
from convoy.pipeline.plan_target import target_for
from convoy.report.html import render
from convoy.report.tables import headlines, print_summary, speedup
from convoy.target import Target
from convoy.tune import SearchResult
from tests.unit.pipeline.nothing_shipped import nothing_shipped


@pytest.fixture(scope="module", autouse=True)
def nothing_ships(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with nothing_shipped(tmp_path_factory.mktemp("shipped")):
        yield


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Flatten(),
        nn.Linear(32 * 14 * 14, 10),
    ).eval()  # fmt: skip


@pytest.fixture(scope="module")
def result(model: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> OptimizeResult:
    database = tmp_path_factory.mktemp("empty") / "perf.db"
    settings = convoy.Settings(db=database, effort=convoy.Effort.NONE)
    return optimize_model(model, (torch.randn(1, 3, 32, 32),), name="small", settings=settings)


def test_floors_come_from_the_rates_of_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def rates(target: Target, *, brief: bool = False) -> Peaks:
        asked.append(brief)
        return Peaks(1e9 / len(asked), {"fp32": 1e6 / len(asked)})  # lower with each measurement

    monkeypatch.setattr(ceilings, "peaks", rates)
    settings = convoy.Settings(db=tmp_path / "perf.db", effort=convoy.Effort.NONE)
    found = optimize_model(nn.Conv2d(3, 8, 3).eval(), (torch.randn(1, 3, 8, 8),), name="one", settings=settings)
    assert asked == [True]
    (layer,) = found.summary.layers
    assert layer.floor_us == pytest.approx(layer.flops)
    assert layer.median_us == pytest.approx(layer.floor_us, rel=0.01)


def test_nothing_is_below_its_floor_and_every_time_is_marked(result: OptimizeResult) -> None:
    layers = result.summary.layers
    assert len(layers) >= 3
    for layer in layers:
        assert layer.predicted
        assert layer.baseline_predicted
        assert layer.floor_us is not None
        assert layer.median_us >= layer.floor_us
        assert all(c.median_us >= layer.floor_us for c in layer.candidates if c.predicted and c.layout == layer.layout)
        assert speedup(layer) == ""
    heavy = max(layers, key=lambda layer: layer.flops)
    assert heavy.median_us > 2 * min(layer.median_us for layer in layers)  # not one number for all


def test_the_notes_say_what_is_not_known_and_what_to_run(result: OptimizeResult) -> None:
    told = [note for note in result.plan.notes if note.startswith(NOTHING_KNOWN)]
    assert len(told) == 1
    assert "measure once, at effort quick (`effort`, `--effort quick`)" in told[0]
    assert any("were never measured on this device" in note for note in result.plan.notes)
    assert result.plan.notes == result.summary.notes


def test_table_page_and_plan_mark_what_is_predicted(
    result: OptimizeResult, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    print_summary(result.summary, {})
    out = capsys.readouterr().out
    first = f"~{result.summary.layers[0].median_us:.1f}"
    assert first in out
    assert first in render(result.summary)
    assert "can be under" not in out
    assert re.search(r"add up to ~\d", "\n".join(headlines(result.summary)))
    assert "measured times" not in out
    plans.save(result.plan, tmp_path / "p.json")
    plan = plans.load(tmp_path / "p.json")
    assert plan == result.plan
    assert plan.predicted
    assert first in plans.explain(plan)
    for layer in result.summary.layers:  # whether the plan runs, or the whole net was not faster
        text = plans.explain(plan, layer.name)
        assert f"~{layer.median_us:.2f}" in text
        assert f"~{layer.baseline_us:.2f}" in text or not layer.baseline_us
        assert re.search(r"aten +- .*~", text)


def test_a_search_without_enough_time_names_another_remedy() -> None:
    rows = {"a": (), "b": ()}
    cut = prediction_notes(SearchResult(rows=rows, predicted=1, cut="after 3 s, with 1 of 6 stages of the search done"))
    assert cut[0].startswith(NOTHING_KNOWN)
    assert "--time" in cut[0]
    some = prediction_notes(SearchResult(rows=rows, predicted=1, predicted_from=9))
    assert len(some) == 1
    assert "predicted from 9 measurements" in some[0]
    assert NOTHING_KNOWN not in some[0]
    assert prediction_notes(SearchResult(rows=rows)) == []


def test_floors_of_problems_are_those_of_the_report(model: nn.Module, result: OptimizeResult, tmp_path: Path) -> None:
    settings = convoy.Settings(db=tmp_path / "perf.db")
    target = target_for("cpu")
    net = captured_net("small", isolate(model, (torch.randn(1, 3, 32, 32),), {}), settings, target)
    floor = problem_floor(net, peaks(target, brief=True))
    assert floor is not None
    problems = {problem.key: problem for region in net.regions for problem in region.problems}
    for layer in result.summary.layers:
        if layer.problem in problems:
            assert floor(problems[layer.problem]) == pytest.approx(layer.floor_us)
    assert problem_floor(net, None) is None
