"""A plan whose sum is wrong does not go out: what was only predicted is tried, and what is left falls back to PyTorch."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from convoy.deadline import Deadline
from convoy.perfdb import Database
from convoy.perfdb.row import Measurement, Status
from convoy.pipeline.check import end_to_end
from convoy.pipeline.check.least_error import least_error
from convoy.pipeline.check.verify_predicted import rebuild_until_verified
from convoy.pipeline.optimize import optimize_model
from convoy.problem import EngineConfig
from convoy.settings import Settings
from convoy.torch_compile.training_graph import TracedGraph
from convoy.training.tune_step import tune_training_step
from convoy.tune import SearchResult
from tests.unit.pipeline.nothing_shipped import nothing_shipped


@pytest.fixture(scope="module", autouse=True)
def nothing_ships(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """PyTorch's own times do not decide what is chosen first: nothing is known of them."""
    with nothing_shipped(tmp_path_factory.mktemp("shipped")):
        yield


def settings(path: Path, engine: str) -> Settings:
    extra = (f"{engine}=tests.unit.pipeline.unproven_engines:{engine.capitalize()}",)
    return Settings(db=path, isolate=False, effort="none", engines=extra, only_engines=(engine,), layout="nchw")


def favour(patch: pytest.MonkeyPatch, module: str, engine: str) -> None:
    """Let predictions hold an engine to be a thousand times as fast as PyTorch at every convolution."""
    where = importlib.import_module(module)
    measure = where.measure

    def favoured(*args: Any, **options: Any) -> SearchResult:
        found = measure(*args, **options)
        for key, rows in found.rows.items():
            if key.startswith("conv:"):
                rows[:] = [row for row in rows if row.config.engine == "aten"]
                rows.append(
                    Measurement(
                        key, EngineConfig(engine, 1), rows[0].target, rows[0].protocol, Status.OK, median_us=1e-3
                    )
                )
        return found

    patch.setattr(where, "measure", favoured)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(800, 4))


def image(scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(1))


def test_a_predicted_kernel_that_is_wrong_is_found_and_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    favour(monkeypatch, "convoy.pipeline.tune_in_time", "wrong")
    model, path, told = net(), tmp_path / "rows.db", []
    result = optimize_model(
        model, (image(),), name="net", settings=settings(path, "wrong"), observer=lambda words, *_: told.append(words)
    )
    assert told.count("measuring predicted candidates") == 2
    with Database.open(path, shipped=False) as database:
        rows = [row for row in database.rows() if row.config.engine == "wrong"]
    assert [row.status for row in rows] == [Status.WRONG_RESULT] * 2
    assert "wrong" not in {step.config.engine for step in result.plan.steps}
    assert any("2 predicted candidates gave wrong results" in note for note in result.plan.notes)
    assert not any("error of" in note for note in result.plan.notes)
    torch.testing.assert_close(result.program(image()), model(image()))


def test_a_sum_that_is_wrong_though_its_parts_are_right_falls_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    favour(monkeypatch, "convoy.pipeline.tune_in_time", "shy")
    model, path = net(), tmp_path / "rows.db"
    result = optimize_model(model, (image(1000.0),), name="net", settings=settings(path, "shy"))
    with Database.open(path, shipped=False) as database:
        assert {row.status for row in database.rows() if row.config.engine == "shy"} == {Status.OK}
    assert result.plan.baseline
    assert any("the outputs' error of" in note and "the plan is the baseline" in note for note in result.plan.notes)
    torch.testing.assert_close(result.program(image(1000.0)), model(image(1000.0)))


def test_what_is_right_is_not_proven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Effort `none` promises to measure nothing."""
    favour(monkeypatch, "convoy.pipeline.tune_in_time", "shy")
    path = tmp_path / "rows.db"
    result = optimize_model(net(), (image(),), name="net", settings=settings(path, "shy"))
    with Database.open(path, shipped=False) as database:
        assert not database.rows()
    assert not any("error of" in note for note in result.plan.notes)


def test_a_step_is_proven_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    favour(monkeypatch, "convoy.pipeline.tune_in_time", "wrong")
    model, path = net(), tmp_path / "rows.db"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = (image(), torch.tensor([0, 1]))
    result = tune_training_step(model, nn.functional.cross_entropy, optimizer, batch, settings=settings(path, "wrong"))
    with Database.open(path, shipped=False) as database:
        assert {row.status for row in database.rows() if row.config.engine == "wrong"} == {Status.WRONG_RESULT}
    assert not result.plan.baseline or not any("error of" in note for note in result.plan.notes)
    assert "wrong" not in {step.config.engine for step in result.plan.steps}


def test_a_traced_pass_is_proven_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    favour(monkeypatch, "convoy.torch_compile.training_graph", "wrong")
    graphs: list[TracedGraph] = []
    tune = TracedGraph._tune

    def watched(self: TracedGraph, args: Any) -> Any:
        graphs.append(self)
        return tune(self, args)

    monkeypatch.setattr(TracedGraph, "_tune", watched)
    torch._dynamo.reset()
    model, path = net(), tmp_path / "rows.db"
    chosen = settings(path, "wrong")
    names = ("db", "isolate", "effort", "engines", "only_engines", "layout")
    compiled = torch.compile(model, backend="convoy", options={name: getattr(chosen, name) for name in names})
    loss = nn.functional.cross_entropy(compiled(image()), torch.tensor([0, 1]))
    loss.backward()
    assert len(graphs) == 2
    for graph in graphs:
        assert graph.plan is not None
        assert "wrong" not in {step.config.engine for step in graph.plan.steps}
        assert not any("error of" in note for note in graph.plan.notes)
    with Database.open(path, shipped=False) as database:
        assert {row.status for row in database.rows() if row.config.engine == "wrong"} == {Status.WRONG_RESULT}
    stock = net()
    nn.functional.cross_entropy(stock(image()), torch.tensor([0, 1])).backward()
    torch.testing.assert_close(model[0].weight.grad, stock[0].weight.grad)


@pytest.mark.parametrize(
    ("numerics", "error", "baseline", "wrong"),
    [
        ("as_torch", 9e-4, 1e-7, False),
        ("as_torch", 2e-3, 1e-7, True),
        ("as_torch", 9e-3, 2.6e-3, False),
        ("as_torch", 1.2e-2, 2.6e-3, True),
        ("strict", 9e-6, 1e-7, False),
        ("strict", 2e-5, 1e-7, True),
        ("strict", float("nan"), 1e-7, True),
        ("half", float("inf"), 5e-3, True),
    ],
)
def test_how_far_off_outputs_may_be(numerics: str, error: float, baseline: float, wrong: bool) -> None:
    found = end_to_end.why_wrong(
        "the outputs'",
        end_to_end.OutputErrors(error, error),
        end_to_end.OutputErrors(baseline, baseline),
        least_error(numerics),
    )
    assert bool(found) == wrong


def test_after_the_deadline_nothing_is_measured_or_built_again() -> None:
    built: list[SearchResult] = []

    def build(found: SearchResult) -> SimpleNamespace:
        built.append(found)
        return SimpleNamespace(plan=None, wrong="off by much")

    found, over = SearchResult(rows={}), Deadline(0.0)
    answer, after = rebuild_until_verified(build, None, found, Settings(), None, None, over)  # type: ignore[arg-type]
    assert (answer.wrong, after, len(built)) == ("off by much", found, 1)
