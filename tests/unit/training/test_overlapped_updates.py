"""Parameters that are updated while the backward pass goes on: the same bits, no sooner than they may, and early indeed."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import convoy
from convoy.pipeline.check import end_to_end
from convoy.training import overlapped_updates
from convoy.training.allreduce import overlapped_allreduce
from convoy.training.allreduce.bucket_completion import BucketCompletion
from convoy.training.allreduce.gradient_allreduce import GradientAllReduce
from convoy.training.allreduce.overlapped_allreduce import OverlappedAllReduce
from convoy.training.overlapped_updates import OverlappedUpdates, ReadAfterUpdateError, make_overlapped_updates
from convoy.training.step import TrainingStep


class Net(nn.Module):
    """Convolutions in a row, so that the last layer's gradients are there long before the first one's."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(3 if i == 0 else 6, 6, 3, padding=1) for i in range(4))
        self.fc = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.fc(x.mean((2, 3)))


BATCH = (torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(4))
OPTIMIZERS: dict[str, Callable[[list[dict[str, Any]]], torch.optim.Optimizer]] = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01),
}


def trained(monkeypatch: pytest.MonkeyPatch, kind: str) -> TrainingStep:
    """A step that has made one update, so that the optimizer has its state; small buckets."""
    monkeypatch.setattr(end_to_end, "is_faster", lambda *_: True)
    monkeypatch.setattr(overlapped_updates, "BUCKET_BYTES", 1 << 10)
    torch.manual_seed(0)
    model = Net()
    groups = [{"params": [*model.fc.parameters()], "lr": 0.02}, {"params": [*model.layers.parameters()]}]
    settings = convoy.Settings(isolate=False, solver="baseline", only_engines=("aten",), db=None)
    step = convoy.training_step(model, cross_entropy, OPTIMIZERS[kind](groups), BATCH, settings=settings)
    step(*BATCH)
    return step


def updates_for(step: TrainingStep) -> OverlappedUpdates:
    runnable = step.program.runnable
    assert runnable is not None
    slots = [step.program.capture.parameters.index(name) for name in step.program.capture.learned]
    made = make_overlapped_updates(runnable.bound, step.work.learned(), slots, step.optimizer)
    assert made is not None
    return made


def work(step: TrainingStep, made: OverlappedUpdates | None) -> None:
    with torch.no_grad():
        step.work.run(BATCH, first=True, last=True, updates=made)


def weights(step: TrainingStep) -> list[torch.Tensor]:
    return [p.detach().clone() for p in step.model.parameters()]


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_early_updates_have_the_bits_of_one_at_the_end(monkeypatch: pytest.MonkeyPatch, kind: str):
    step = trained(monkeypatch, kind)
    kept = copy.deepcopy((step.model.state_dict(), step.optimizer.state_dict()))
    ends = []
    for early in (False, True):
        step.model.load_state_dict(kept[0])
        step.optimizer.load_state_dict(copy.deepcopy(kept[1]))
        for _ in range(3):
            work(step, updates_for(step) if early else None)
        ends.append(weights(step))
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))
    assert not all(torch.equal(one, kept[0][name]) for name, one in step.model.state_dict().items())
    assert [len(group["params"]) for group in step.optimizer.param_groups] == [2, 8]


def test_updates_begin_before_the_pass_ends(monkeypatch: pytest.MonkeyPatch):
    step = trained(monkeypatch, "sgd")
    made, seen = updates_for(step), []
    begin = made._update
    launched = [0]
    after = made.after
    monkeypatch.setattr(made, "after", lambda index, slots: (launched.__setitem__(0, index), after(index, slots)))
    monkeypatch.setattr(
        made, "_update", lambda part, slots: (seen.append((launched[0], len(part))), begin(part, slots))
    )
    work(step, made)
    assert sum(count for _, count in seen) == len(list(step.model.parameters()))
    last = len(made._steps) - 1
    assert seen[0][0] < last / 2 + last / 4  # the classifier's, with three quarters of the launches queued at most
    assert len(seen) >= 3


class Heard(GradientAllReduce):
    """Says when a bucket leaves and when somebody waits for it, and changes nothing."""

    def __init__(self, said: list[Any]) -> None:
        super().__init__(None, torch.device("cpu"))
        self.said = said

    def begin(self, bucket: Sequence[torch.Tensor], made: Sequence[torch.cuda.Event] = ()) -> None:
        self.said.append(("sent", frozenset(map(id, bucket))))

    def receive(self) -> None:
        self.said.append("waited")


def test_with_several_processes_a_bucket_is_updated_when_it_has_left_and_is_back(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        overlapped_allreduce,
        "allreduce_buckets",
        functools.partial(overlapped_allreduce.allreduce_buckets, limit=1 << 10),
    )
    step, said = trained(monkeypatch, "sgd"), []
    runnable = step.program.runnable
    assert runnable is not None
    learned = step.work.learned()
    step.work.update.averages = averages = Heard(said)
    step.work.overlap = OverlappedAllReduce(runnable.bound, len(learned), averages)
    step.work.options = replace(step.work.options, early_updates=True)
    made = step.work.overlapped_updates()
    assert made is not None
    assert [len(bucket) for bucket in made._buckets] == [len(bucket) for bucket in step.work.overlap.buckets]
    begin = made._update

    def noted(part: Sequence[tuple[nn.Parameter, int]], slots: Sequence[torch.Tensor | None]) -> None:
        said.append(("updated", frozenset(id(slots[slot]) for _, slot in part)))
        begin(part, slots)

    monkeypatch.setattr(made, "_update", noted)
    before = weights(step)
    work(step, made)
    assert not any(torch.equal(one, other) for one, other in zip(before, weights(step), strict=True))
    sent = [what for kind, what in filter(lambda one: one != "waited", said) if kind == "sent"]
    assert len(sent) > 3
    for bucket in sent:
        left, updated = said.index(("sent", bucket)), said.index(("updated", bucket))
        assert "waited" in said[left:updated]
    assert said.index(("updated", sent[0])) < said.index(("sent", sent[-1]))  # and not at the end


def test_what_is_averaged_at_the_end_is_updated_at_the_end(monkeypatch: pytest.MonkeyPatch):
    step = trained(monkeypatch, "sgd")
    runnable = step.program.runnable
    assert runnable is not None
    step.work.options = replace(step.work.options, early_updates=True)
    step.work.update.averages, step.work.overlap = Heard([]), None
    assert step.work.overlapped_updates() is None


@pytest.mark.parametrize(
    ("wanted", "step_us", "early"),
    [(None, 0.0, False), (None, 1e-3, True), (None, 1e6, False), (True, 1e6, True), (False, 1e-3, False)],
)
def test_parameters_that_are_a_small_part_of_the_step_are_updated_at_its_end(
    monkeypatch: pytest.MonkeyPatch, wanted: bool | None, step_us: float, early: bool
):
    step = trained(monkeypatch, "sgd")
    step.work.options = replace(step.work.options, early_updates=wanted)
    step.work.program = replace(step.program, plan=replace(step.plan, total_us=step_us))
    assert step.program.runnable is not None
    assert (step.work.overlapped_updates() is not None) == early


def test_a_parameter_that_is_still_to_be_read_is_noticed(monkeypatch: pytest.MonkeyPatch):
    """The guard against a launch that reads a parameter by another name, such as a view: planted by an update too early."""
    step = trained(monkeypatch, "sgd")
    made = updates_for(step)
    names = step.program.capture.learned
    weight = step.model.get_parameter("layers.1.weight")
    later = step.program.runnable.bound.outputs[
        1 + names.index("layers.2.weight")
    ]  # its gradient comes first, and has its shape
    begin = next(at for at, one in enumerate(made._steps) if later in one.results)
    made._buckets, made._completion = [[(weight, later)]], BucketCompletion([{begin}])
    with pytest.raises(ReadAfterUpdateError, match="after its update"):
        work(step, made)


def test_only_elementwise_optimizers_update_early(monkeypatch: pytest.MonkeyPatch):
    step = trained(monkeypatch, "sgd")
    runnable = step.program.runnable
    assert runnable is not None
    parameters = step.work.learned()
    slots = [step.program.capture.parameters.index(name) for name in step.program.capture.learned]
    assert make_overlapped_updates(runnable.bound, parameters, slots, torch.optim.Adagrad(parameters)) is None
