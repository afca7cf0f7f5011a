"""Advice: where straight lines between measured points cross the dense time, and who is asked for what."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from convoy.capture import Captured, capture_inference
from convoy.engines.base import Engine, Executable
from convoy.errors import InputError
from convoy.measurement import ReplayRunner
from convoy.measurement.protocol import Protocol
from convoy.measurement.runner import Request
from convoy.perfdb import Database
from convoy.perfdb.row import Measurement, Status
from convoy.problem import ConvProblem, Knobs, Problem
from convoy.prune import Advice, advise, break_even
from convoy.prune.advise import FULL_GRID
from convoy.settings import Settings
from convoy.support import Support
from convoy.target import Target

CPU = Target("cpu", "test", "generic", 1, 1 << 34, 0)

DENSE_US = 100.0


class Sparse(Engine):
    """Reads masks, but not those of 1x1 filters that keep more than half of their weights."""

    id = "sparse"
    family = "direct"
    reads_mask = True

    def supports(self, problem: Problem, target: Target) -> Support:
        if not isinstance(problem, ConvProblem) or problem.mask is None:
            return Support.no("needs a mask")
        if problem.is_pointwise and problem.mask.sparsity < 0.55:
            return Support.no("its code would be too large")
        return Support.yes()

    def build(self, problem: Problem, knobs: Knobs, target: Target) -> Executable:
        raise NotImplementedError


class Timed(ReplayRunner):
    """Dense engines take 100 us in nchw and 110 in nhwc; the sparse one 20 us and 2 us a percent of weights that stay."""

    def __init__(self) -> None:
        super().__init__([])
        self.asked: list[tuple[str, ConvProblem]] = []  # type: ignore[assignment]

    def measure(self, request: Request, protocol: Protocol) -> Iterator[Measurement]:
        problem = request.problem
        assert isinstance(problem, ConvProblem)
        for config in request.configs:
            self.asked.append((config.engine, problem))
            us = DENSE_US if config.engine == "aten" else 20.0
            if config.engine == "sparse":
                assert problem.mask is not None
                us += 200 * (1 - problem.mask.sparsity)
            us += 10 * (problem.layout == "nhwc")
            yield Measurement(problem.key, config, CPU.digest, protocol.id, Status.OK, request.rounds, us)


@pytest.fixture(scope="module")
def captured() -> Captured:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(3, 20, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(20, 20, 1),
            nn.Conv2d(20, 20, 1),
            nn.Flatten(),
            nn.Linear(320, 2),
        ).eval()
    return capture_inference(model, (torch.zeros(1, 3, 4, 4),))


@pytest.fixture
def run(captured: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "sparse_engine", SimpleNamespace(Sparse=Sparse))  # type: ignore[arg-type]

    def call(engines: tuple[str, ...] = ("aten", "sparse"), **words: object) -> tuple[Advice, Timed]:
        runner = Timed()
        patterns = {"patterns": words.pop("patterns")} if "patterns" in words else {}
        settings = Settings(db=tmp_path / "perf.db", engines=("sparse=sparse_engine:Sparse",), **words)  # type: ignore[arg-type]
        with Database.open(settings.db) as database:
            found = advise(
                "net",
                captured,
                target=CPU,
                settings=settings,
                database=database,
                runner=runner,
                engine_ids=engines,
                **patterns,  # type: ignore[arg-type]
            )
        return found, runner

    return call


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ([(0.5, 120.0), (0.7, 80.0), (0.9, 40.0)], 0.6),
        ([(0.5, 120.0), (0.7, 100.0), (0.9, 40.0)], 0.7),
        ([(0.5, 90.0), (0.9, 40.0)], 0.5),
        ([(0.5, 130.0), (0.9, 110.0)], None),
        ([(0.5, 90.0), (0.7, 110.0), (0.9, 90.0)], 0.8),
        ([(0.5, 90.0), (0.9, 110.0)], None),
        ([(0.5, 90.0)], 0.5),
        ([], None),
    ],
)
def test_break_even(points: list[tuple[float, float]], expected: float | None) -> None:
    assert break_even(points, DENSE_US) == (None if expected is None else pytest.approx(expected))


def test_each_distinct_layer_by_pattern(run) -> None:
    found, runner = run()
    assert [len(layer.names) for layer in found.layers] == [1, 2]
    first, pointwise = found.layers
    assert (first.dense_us, first.dense_engine) == (100.0, "aten")
    assert ":bias+relu" in first.problem
    rows = {row.pattern: row for row in first.patterns}
    assert list(rows) == ["unstructured", "2:4", "block:1x8", "channel"]
    assert [point.sparsity for point in rows["unstructured"].points] == pytest.approx([0.3, 0.6, 0.9], abs=1e-3)
    assert [point.us for point in rows["unstructured"].points] == pytest.approx([160.0, 100.0, 40.0], abs=0.2)
    assert rows["unstructured"].break_even == pytest.approx(0.6)
    assert rows["unstructured"].best is rows["unstructured"].points[-1]
    assert (rows["2:4"].points, rows["2:4"].break_even, rows["2:4"].best) == ((), None, None)
    assert rows["2:4"].reason == "its 3 input channels a group are no multiple of 4"
    assert rows["channel"].break_even == pytest.approx(0.6)
    rows = {row.pattern: row for row in pointwise.patterns}
    assert rows["2:4"].reason == "sparse: its code would be too large"
    points = rows["unstructured"].points
    assert [(point.engine, point.reason) for point in points[:2]] == [
        ("", "sparse: its code would be too large"),
        ("sparse", ""),
    ]
    assert rows["unstructured"].break_even == pytest.approx(0.6)
    assert {engine for engine, problem in runner.asked if problem.mask is not None} == {"sparse"}
    assert {engine for engine, problem in runner.asked if problem.mask is None} == {"aten"}
    assert json.loads(json.dumps(found.to_dict()))["layers"][0]["patterns"][0]["break_even"] == pytest.approx(0.6)


def test_what_is_in_the_database_is_not_measured_again(run) -> None:
    found, first = run(patterns=("unstructured",))
    again, second = run(patterns=("unstructured",))
    assert first.asked
    assert not second.asked
    assert again == found


def test_the_full_grid(run) -> None:
    found, _ = run(patterns=("unstructured",), effort="full")
    assert [point.sparsity for point in found.layers[0].patterns[0].points] == pytest.approx(FULL_GRID, abs=1e-3)


def test_where_no_engine_reads_masks_it_says_so_and_measures_nothing(run) -> None:
    found, runner = run(("aten",))
    assert found.layers == ()
    assert found.notes == ("no engine reads masks on test at numerics as_torch: pruning makes no layer faster here",)
    assert not runner.asked


def test_advice_is_not_predicted(run) -> None:
    with pytest.raises(InputError, match="measured, not predicted"):
        run(effort="none")
    with pytest.raises(InputError, match="pattern"):
        run(patterns=("any",))


def test_weights_must_be_finite_and_there(run, captured: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = next(name for name, tensor in captured.constants.items() if tensor.dim() == 4)
    monkeypatch.setitem(captured.constants, weight, torch.full_like(captured.constants[weight], float("nan")))
    with pytest.raises(InputError, match="NaN or infinite"):
        run()
