"""torch.compile(model, backend="convoy") in training: both passes by plans, the eager loop unchanged."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from convoy import progress
from convoy.errors import InputError
from convoy.pipeline.check import end_to_end
from convoy.torch_compile import training_graph
from convoy.torch_compile.backend import settings_of
from tests.unit.training.training_nets import batches, net, sgd

X = torch.randn(1, 3, 6, 6, generator=torch.Generator().manual_seed(1))
OPTIONS: dict[str, Any] = {"isolate": False, "solver": "baseline", "only_engines": ("aten",)}


@pytest.fixture(scope="module")
def db(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traced") / "perf.db"


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[training_graph.TracedGraph]:
    """The graphs that were compiled, in order."""
    torch.compiler.reset()
    made: list[training_graph.TracedGraph] = []
    before = training_graph.TracedGraph.__init__

    def remember(self: training_graph.TracedGraph, *args: Any) -> None:
        before(self, *args)
        made.append(self)

    monkeypatch.setattr(training_graph.TracedGraph, "__init__", remember)
    return made


def train(model: Any, parameters: nn.Module, count: int = 3) -> list[float]:
    optimizer = sgd(parameters)
    losses = []
    for x, y in batches(count):
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_each_pass_has_a_profile(db: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    torch.compiler.reset()
    model = net()
    compiled = torch.compile(
        model, backend="convoy", options={**OPTIONS, "db": db, "profile": tmp_path / "tuning.json"}
    )
    train(compiled, model, 1)
    assert {path.name for path in tmp_path.iterdir()} == {"tuning.forward.json", "tuning.backward.json"}
    for path in tmp_path.iterdir():
        assert json.loads(path.read_text())["traceEvents"]
    assert capsys.readouterr().err.count("total") == 2


def test_a_profile_in_a_folder_that_does_not_exist_is_an_error(tmp_path: Path):
    with pytest.raises(InputError, match="profile: got"):
        settings_of({"profile": tmp_path / "absent" / "tuning.json"})


def test_an_eager_loop_trains_as_before(graphs: list[training_graph.TracedGraph], db: Path):
    model, stock = net(), net()
    compiled = torch.compile(model, backend="convoy", options={**OPTIONS, "db": db})
    assert train(compiled, model) == pytest.approx(train(stock, stock), rel=1e-4)
    for name, value in stock.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-4, atol=1e-5)
    forward, backward = graphs
    assert {s.problem.split(":")[1] for s in forward.plan.steps if s.pattern == "conv"} == {"fprop"}
    assert {"dgrad", "wgrad"} <= {s.pattern for s in backward.plan.steps}


def test_autocast_goes_through(graphs: list[training_graph.TracedGraph], db: Path):
    model = net()
    compiled = torch.compile(model, backend="convoy", options={**OPTIONS, "db": db})
    with torch.autocast("cpu", torch.bfloat16):
        loss = cross_entropy(compiled(batches(1)[0][0]), batches(1)[0][1])
    loss.backward()
    assert model.stem.weight.grad.dtype == torch.float32
    assert any(".bf16." in step.problem for step in graphs[0].plan.steps)


def test_progress_is_shown_of_both_passes_where_it_is_asked_for(
    db: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(progress, "FIRST_LINE_S", 0.0)
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    torch.compiler.reset()
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
    options = {**OPTIONS, "effort": "none", "db": db}
    torch.compile(model, backend="convoy", options={**options, "progress": True})(X).sum().backward()
    said = capsys.readouterr().err
    assert "convoy: forward pass: " in said
    assert "convoy: backward pass: " in said


def test_a_pass_that_is_not_faster_runs_as_it_was_traced(
    graphs: list[training_graph.TracedGraph], db: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(end_to_end, "is_faster", lambda result, baseline: False)
    model, stock = net(), net()
    compiled = torch.compile(model, backend="convoy", options={**OPTIONS, "solver": "exact", "db": db})
    assert train(compiled, model, 1) == pytest.approx(train(stock, stock, 1), rel=1e-5)
    assert [graph.plan.baseline for graph in graphs] == [True, True]
    assert "not faster" in graphs[0].plan.notes[-1]


def test_a_steady_pass_that_is_not_faster_is_kept_where_pytorchs_own_may_differ(
    graphs: list[training_graph.TracedGraph], db: Path, monkeypatch: pytest.MonkeyPatch
):
    class Reordered(nn.Module):
        """Reads its channels by index: their gradients are summed up in any order, on CPUs too."""

        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 5, 3)
            self.register_buffer("order", torch.tensor([0, 2, 2, 1, 4]))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.conv(x)[:, self.order].mean((2, 3))

    monkeypatch.setattr(end_to_end, "is_faster", lambda result, baseline: False)
    model = Reordered()
    chosen = {**OPTIONS, "solver": "exact", "deterministic": True, "db": db}
    train(torch.compile(model, backend="convoy", options=chosen), model, 1)
    assert [graph.plan.baseline for graph in graphs] == [True, False]
    assert "but kept" in graphs[1].plan.notes[-1]


def test_a_pass_that_is_wrong_as_a_whole_runs_as_it_was_traced(
    graphs: list[training_graph.TracedGraph], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    right = end_to_end.errors_against
    calls: list[int] = []

    def planted(outputs: Any, exact: Any) -> end_to_end.OutputErrors:
        calls.append(1)
        return right(outputs, exact) if len(calls) % 2 else end_to_end.OutputErrors(0.5, 0.5)

    monkeypatch.setattr(end_to_end, "errors_against", planted)
    model = net()
    options = {**OPTIONS, "solver": "exact", "db": tmp_path / "perf.db"}
    compiled = torch.compile(model, backend="convoy", options=options)
    train(compiled, model, 1)
    assert "error of 5.00e-01" in graphs[0].plan.notes[-1]


def test_what_a_graph_cannot_hold_runs_as_it_was_traced_with_a_warning(
    graphs: list[training_graph.TracedGraph], db: Path
):
    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(torch.fft.rfft(x).abs()[:, :8])

    model = Complex()
    compiled = torch.compile(model, backend="convoy", options={**OPTIONS, "db": db})
    with pytest.warns(UserWarning, match="PyTorch runs the forward pass as it was traced"):
        loss = compiled(torch.randn(4, 16)).sum()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loss.backward()
    assert model.fc.weight.grad is not None
    assert graphs[0].plan is None
