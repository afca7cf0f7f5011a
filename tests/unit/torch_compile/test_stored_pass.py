"""Passes of torch.compile start from the plans of finished searches, in a process that compiles the same model again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from convoy.pipeline import whole_model
from convoy.pipeline.check import end_to_end
from convoy.pipeline.stored_plans.plan_store import FROM_DATABASE
from convoy.torch_compile import training_graph

X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Compiles a model, as a new process would."""
    monkeypatch.setattr(end_to_end, "is_faster", lambda *_: True)
    options = {"db": tmp_path / "perf.db", "effort": "none", "only_engines": ("aten",), "isolate": False}

    def compile_(module: nn.Module) -> Any:
        torch._dynamo.reset()
        return torch.compile(module, backend="convoy", options=options)

    return compile_


def test_both_passes_are_searched_for_once(compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[training_graph.TracedGraph] = []
    searches: list[str] = []
    start, measure = training_graph.TracedGraph.__init__, training_graph.measure

    def kept(self: training_graph.TracedGraph, *args: Any, **kwargs: Any) -> None:
        graphs.append(self)
        start(self, *args, **kwargs)

    monkeypatch.setattr(training_graph.TracedGraph, "__init__", kept)
    monkeypatch.setattr(
        training_graph, "measure", lambda net, *r, **k: (searches.append(net.name), measure(net, *r, **k))[1]
    )
    gradients = []
    for _ in range(2):
        module = model()
        compiled(module)(X).square().sum().backward()
        gradients.append([parameter.grad for parameter in module.parameters()])
    assert sorted(searches) == ["backward", "forward"]
    notes = [graph.plan.notes for graph in graphs if graph.plan is not None]
    assert [any(note.startswith(FROM_DATABASE) for note in one) for one in notes] == [False, False, True, True]
    for first, second in zip(*gradients, strict=True):
        assert torch.equal(first, second)


def test_a_graph_without_gradients_is_searched_for_once(compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    searches: list[str] = []
    search = whole_model.tune_in_time
    monkeypatch.setattr(
        whole_model, "tune_in_time", lambda net, *rest: (searches.append(net.name), search(net, *rest))[1]
    )
    made = []
    for _ in range(2):
        with torch.no_grad():
            made.append(compiled(model().eval())(X))
    assert searches == ["a graph of torch.compile"]
    assert torch.equal(*made)
