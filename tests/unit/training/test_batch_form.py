"""Batches whose inputs are given by position or by name, and targets by the names of the loss: one step's program runs them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.testing import assert_close

import convoy
from convoy.errors import InputError
from convoy.training.batch_form import BatchForms, ordered
from convoy.training.step_work import StepWork
from tests.unit.pipeline.untimed import plans_kept

A = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
B = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(2))
Y = torch.tensor([0, 2])


class Two(nn.Module):
    """Two inputs and an option."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.depth, self.head = nn.Conv2d(3, 4, 3), nn.Conv2d(1, 4, 3), nn.Linear(144, 5)

    def forward(self, image: torch.Tensor, depth: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.head((self.image(image) + self.depth(depth) * scale).flatten(1))


SAME = {
    "a tuple": (A, B),
    "a list": [A, B],
    "a dictionary": {"image": A, "depth": B},
    "in another order": {"depth": B, "image": A},
    "with a default": (A, B, 1.0),
    "by name with a default": {"scale": 1.0, "depth": B, "image": A},
}


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> convoy.Settings:
    return convoy.Settings(effort="none", db=tmp_path_factory.mktemp("batches") / "perf.db")


@pytest.fixture
def stock_runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Grows with every step that PyTorch runs; a warning is an error."""
    seen: list[int] = []
    run = StepWork.run_stock
    monkeypatch.setattr(StepWork, "run_stock", lambda self, *a, **k: (seen.append(1), run(self, *a, **k))[1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield seen


def step_for(x: Any, settings: convoy.Settings) -> convoy.TrainingStep:
    model = Two()
    with plans_kept():
        step = convoy.training_step(
            model, cross_entropy, torch.optim.SGD(model.parameters(), lr=0.0), (x, Y), settings=settings
        )
    assert not step.plan.baseline
    return step


@pytest.mark.parametrize("example", ["a tuple", "in another order", "with a default"])
def test_every_form_of_a_batch_runs_the_program(example: str, settings: convoy.Settings, stock_runs: list[int]) -> None:
    step = step_for(SAME[example], settings)
    stock_runs.clear()
    wanted = cross_entropy(step.model(A, B), Y)
    for x in SAME.values():
        assert_close(step(x, Y), wanted, rtol=1e-4, atol=1e-5)
        assert_close(step(x, target=Y), wanted, rtol=1e-4, atol=1e-5)
    assert stock_runs == []


def test_another_option_is_another_batch(settings: convoy.Settings) -> None:
    step = step_for((A, B), settings)
    for x in ((A, B, 2.0), {"image": A, "depth": B, "scale": 2.0}):
        step._warned.clear()
        with pytest.warns(UserWarning, match="no plan for this batch"):
            loss = step(x, Y)
        assert_close(loss, cross_entropy(step.model(A, B, 2.0), Y), rtol=1e-4, atol=1e-5)


def weighted(output: torch.Tensor, target: torch.Tensor, weight: float = 1.0, *, power: int = 2) -> torch.Tensor:
    return ((output - target) * weight).pow(power).mean()


def test_targets_by_the_names_of_the_loss() -> None:
    forms = BatchForms(Two(), weighted, None)
    assert forms.targets((), {"target": 3}) == (3,)
    assert forms.targets((), {"weight": 0.5, "target": 3}) == (3, 0.5)
    assert forms.targets((3,), {"weight": 0.5}) == (3, 0.5)
    module = BatchForms(Two(), nn.CrossEntropyLoss(), None)
    assert module.targets((), {"target": 3}) == (3,)
    assert BatchForms(Two(), cross_entropy, None).targets((), {"target": 3, "ignore_index": 1}) == (3, None, None, 1)


@pytest.mark.parametrize("named", [{"label": 1}, {"target": 1, "power": 3}, {"output": 1, "target": 1}, {}])
def test_names_that_the_loss_does_not_take_are_refused(named: dict[str, int]) -> None:
    with pytest.raises(InputError, match="step: got"):
        BatchForms(Two(), weighted, None).targets((), named)


def test_a_dictionary_of_inputs_is_put_in_the_order_of_the_parameters() -> None:
    assert list(ordered(Two(), ({"depth": B, "image": A}, Y))[0]) == ["image", "depth"]
    other = ({"wrong": A}, Y)
    assert ordered(Two(), other) is other
