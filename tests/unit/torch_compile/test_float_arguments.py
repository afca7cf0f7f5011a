"""A float argument that changes from call to call is an input of a compiled graph, in inference and in training."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from convoy.torch_compile.training_graph import TracedGraph

X = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(1))


class Scales(nn.Module):
    """Multiplies its result by a number."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor, factor: float) -> torch.Tensor:
        return self.norm(self.conv(x)) * factor + factor**2


@pytest.fixture
def tuned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the passes that were captured and have a plan, in order."""
    torch.compiler.reset()
    found: list[str] = []
    before = TracedGraph._tune

    def remember(self: TracedGraph, args: Any) -> Any:
        made = before(self, args)
        if self.plan is not None:
            found.append(self._name)
        return made

    monkeypatch.setattr(TracedGraph, "_tune", remember)
    return found


@pytest.mark.parametrize("training", [False, True])
def test_a_float_that_changes_is_an_input(tuned: list[str], tmp_path: Path, training: bool):
    model = Scales().train(training)
    stock = copy.deepcopy(model)
    compiled = torch.compile(model, backend="convoy", options={"effort": "none", "db": tmp_path / "perf.db"})
    with warnings.catch_warnings(), torch.set_grad_enabled(training):
        warnings.simplefilter("error", UserWarning)
        for factor in (1.0, 0.5, 0.25, 3.7, 3.7):
            made, wanted = compiled(X, factor), stock(X, factor)
            torch.testing.assert_close(made, wanted, rtol=1e-4, atol=1e-5)
            if training:
                made.square().sum().backward()
                wanted.square().sum().backward()
    for found, other in zip(model.parameters(), stock.parameters(), strict=True):
        if training:
            torch.testing.assert_close(found.grad, other.grad, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(model.norm.running_mean, stock.norm.running_mean)
    # The first value is a constant of a graph; the second makes it an input of another, which runs all later ones.
    assert tuned == (["forward", "backward"] * 2 if training else ["forward"])
