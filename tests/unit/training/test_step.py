"""A step whose capture fails: it is launched kernel by kernel, says why, and trains as PyTorch does. On a CPU, planted."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import convoy
from convoy.errors import LaunchError
from convoy.training import step_capture
from convoy.training.step import TrainingStep
from convoy.training.step_program import StepOptions

WORDS = "operation not permitted when stream is capturing"


def net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(4)
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [(torch.randn(4, 3, 6, 6, generator=generator), torch.arange(4)) for _ in range(count)]


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan of the net, so that the tests measure nothing."""
    folder = tmp_path_factory.mktemp("step")
    settings = convoy.Settings(
        isolate=False, solver="baseline", only_engines=("aten",), effort=convoy.Effort.NONE, db=folder / "perf.db"
    )
    model = net()
    return convoy.training_step(model, cross_entropy, sgd(model), batches(1)[0], settings=settings).save(folder / "p")


class Refuses:
    """Stands for StepGraph: its capture fails."""

    def __init__(self, error: Exception) -> None:
        self.error, self.made = error, 0

    def __call__(self, *_: Any, **__: Any) -> Any:
        self.made += 1
        raise self.error


def as_if_on_gpu(step: TrainingStep) -> TrainingStep:
    """A step that takes its device for a GPU, and so wants a graph."""
    step.guard.device = step.work.device = torch.device("cuda")
    return step


@pytest.mark.parametrize("error", [RuntimeError(f"{WORDS}\nand a second line"), LaunchError(WORDS)])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("baseline", [False, True])
def test_a_step_that_cannot_be_captured_runs_launch_by_launch_and_says_why(
    plan: Path, monkeypatch: pytest.MonkeyPatch, baseline: bool, accumulate: int, error: Exception
):
    model, stock = net(), net()
    ours, theirs = sgd(model), sgd(stock)
    step = convoy.training_step(model, cross_entropy, ours, batches(1)[0], accumulate=accumulate, plan=plan)
    if baseline:  # PyTorch's own kernels would be captured
        program = dataclasses.replace(step.program, runnable=None)
        step = TrainingStep(model, cross_entropy, ours, StepOptions(accumulate=accumulate), program)
    as_if_on_gpu(step)
    refuses = Refuses(error)
    monkeypatch.setattr(step_capture, "StepGraph", refuses)
    before = list(step.notes)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for index, (x, y) in enumerate(batches(4 * accumulate)):
            loss = step(x, y)
            if index % accumulate == 0:
                theirs.zero_grad()
            wanted = cross_entropy(stock(x), y)
            (wanted / accumulate).backward()
            if index % accumulate == accumulate - 1:
                theirs.step()
            torch.testing.assert_close(loss, wanted.detach(), rtol=1e-4, atol=1e-5)
    for (name, found), value in zip(model.state_dict().items(), stock.state_dict().values(), strict=True):
        torch.testing.assert_close(found, value, rtol=1e-4, atol=1e-5, msg=name)
    assert refuses.made == 1  # and never tried again
    assert step.notes == [*before, f"the step could not be captured as a CUDA graph: {WORDS}"]
    (warning,) = [str(one.message) for one in said if "captured" in str(one.message)]
    assert warning.startswith("convoy: ")
    assert warning.endswith(f"launched kernel by kernel: {WORDS}")


def test_what_fails_beside_the_capture_is_not_taken_for_it(plan: Path, monkeypatch: pytest.MonkeyPatch):
    model = net()
    step = as_if_on_gpu(convoy.training_step(model, cross_entropy, sgd(model), batches(1)[0], plan=plan))
    monkeypatch.setattr(step_capture, "StepGraph", Refuses(ValueError("a slip of ours")))
    step(*batches(1)[0])
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="a slip of ours"):
        step(*batches(1)[0])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
