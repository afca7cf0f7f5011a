"""FunctionState: which values a function reads, when they have changed, and how they are put back."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from convoy.capture.function_state import FunctionState

FACTOR, UNREAD = 1.0, 1.0


class Holder:
    """A method that reads one attribute by another method, and leaves one alone."""

    def __init__(self) -> None:
        self.factor, self.steps = 0.5, 0

    def scale(self, value: float) -> float:
        return value * self.factor

    def loss(self, value: float) -> float:
        return self.scale(value)


def reads_global(value: float) -> float:
    return value * FACTOR


def test_what_is_read_is_watched_and_nothing_else(monkeypatch: Any) -> None:
    held, table, limit = Holder(), {"a": 1.0}, 3
    items = [1, 2]
    net = nn.Linear(2, 2)

    def closure(value: float) -> Any:
        return net(torch.tensor([value * table["a"], limit])) + len(items)

    state = FunctionState([held.loss, reads_global, closure, functools.partial(max, items)])
    assert state.modules == [net]
    held.steps = 7
    monkeypatch.setattr(f"{__name__}.UNREAD", 2.0)
    assert state.changed() == ""
    held.factor = 1 / 2  # equal, and another object
    assert state.changed() == ""
    for change, name in (
        (lambda: setattr(held, "factor", 2.0), "loss.factor"),
        (lambda: monkeypatch.setattr(f"{__name__}.FACTOR", True), "FACTOR"),
        (lambda: table.update(a=2.0), "table"),
        (lambda: items.append(3), "items"),
    ):
        change()
        assert state.changed() == name
        state.restore()
        assert state.changed() == ""
    assert (held.factor, FACTOR, table, items) == (0.5, 1.0, {"a": 1.0}, [1, 2])
    limit = 4
    assert state.changed() == "limit"


def test_tensors_count_by_identity_and_libraries_are_left_alone() -> None:
    box = SimpleNamespace(weight=torch.ones(3))

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output, target, weight=box.weight)

    state = FunctionState([loss, nn.functional.cross_entropy, torch.relu])
    box.weight.mul_(2)
    assert state.changed() == ""
    box.weight = torch.ones(3)
    assert state.changed() == "box.weight"


def test_modules_that_are_watched_elsewhere_are_not_given_again() -> None:
    net = nn.Sequential(nn.Linear(2, 2))
    assert FunctionState([lambda x: net(x) + 1], net.modules()).modules == []
    assert FunctionState([lambda x: net(x) + 1]).modules == [net]
