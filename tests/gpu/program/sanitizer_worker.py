"""A training step on several streams under PyTorch's CUDA stream sanitizer: run by `test_sanitizer.py`. Not a test module.

    python sanitizer_worker.py FOLDER program|updates

It runs as it is, which must pass in silence, and says so. Then it runs without its waits, at which the sanitizer must end it.
`program` is loss and gradients alone, and what is taken away are its steps' waits for other streams. `updates` is with parameters
that are updated during the backward pass, on a stream of their own, and what is taken away are that stream's waits.

PyTorch's operators alone run, for the sanitizer sees no others.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.cuda._sanitizer as sanitizer
from torch import nn
from torch.nn.functional import cross_entropy

import convoy
from convoy.capture import TrainingCapture, capture_training
from convoy.perfdb import Database
from convoy.pipeline.measure_net import measure
from convoy.pipeline.net import Net, input_formats, make_net
from convoy.pipeline.observer import ignore_progress
from convoy.pipeline.plan_target import target_for
from convoy.pipeline.select import make_plan, select
from convoy.plan import Plan
from convoy.program import bind
from convoy.program.multi_stream import MultiStreamProgram
from convoy.schedule import parallel_steps
from convoy.training import overlapped_updates


class Branches(nn.Module):
    """Two branches behind a stem, so that weight gradients and branches run beside the chain."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        self.one = nn.Conv2d(16, 16, 1)
        self.two = nn.Conv2d(16, 16, 3, padding=1)
        self.fc = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        return self.fc(torch.relu(torch.cat([self.one(x), self.two(x)], 1)).mean((2, 3)))


def planned(capture: TrainingCapture, inputs: Sequence[torch.Tensor], db: Path) -> tuple[Net, Plan]:
    """The captured step, and a plan of it on three streams."""
    settings = convoy.Settings(db=db, isolate=False, solver="baseline", only_engines=("aten",))
    border = input_formats(capture.captured, inputs)
    net = make_net("branches", capture.captured, border, "nchw", settings, target_for("cuda"))
    with Database.open(settings.db) as database:
        found = measure(net, settings, database, ignore_progress)
    plan = make_plan(net, select(net, found, settings), settings)
    steps = parallel_steps(plan.steps, 3)
    assert {step.stream for step in steps} == {0, 1, 2}
    return net, dataclasses.replace(plan, steps=steps)


def updated(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.optim.Optimizer:
    """An optimizer that has made an update, so that its state is there, in the form that a captured step gives it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    cross_entropy(model(batch[0]), batch[1]).backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def main(folder: Path, *, early: bool) -> None:
    torch.manual_seed(0)
    model = Branches().cuda()
    batch = (torch.randn(4, 3, 16, 16, device="cuda"), torch.arange(4, device="cuda"))
    capture = capture_training(model, cross_entropy, batch)
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    held = [*(parameters[name].detach() for name in capture.parameters), *(buffers[name] for name in capture.buffers)]
    inputs = [*held, *batch]
    net, plan = planned(capture, inputs, folder / "perf.db")
    optimizer = updated(model, batch)
    overlapped_updates.BUCKET_BYTES = 1 << 10
    torch.cuda.synchronize()
    sanitizer.enable_cuda_sanitizer()  # not before: the measurements capture graphs, which it does not follow

    def ready(*, planted: bool) -> Callable[[], object]:
        """Runs the step once; `planted` without the waits."""
        bound = bind(plan, net.captured, net.regions_by_nodes, net.target)
        if planted and not early:
            steps = [dataclasses.replace(one, step=dataclasses.replace(one.step, waits=())) for one in bound.steps]
            bound = dataclasses.replace(bound, steps=steps)
        program = MultiStreamProgram(bound, torch.device("cuda", 0))
        if not early:
            return lambda: program(inputs)
        learned = [parameters[name] for name in capture.learned]
        slots = [capture.parameters.index(name) for name in capture.learned]
        follower = overlapped_updates.make_overlapped_updates(bound, learned, slots, optimizer, program.streams)
        assert follower is not None
        assert len(follower._buckets) > 3
        if planted:
            follower._completion.events = lambda _: []
        return lambda: program(inputs, follower)

    def run(*, planted: bool) -> None:
        step = ready(planted=planted)
        for _ in range(3):
            outputs = step()
            torch.stack([output.float().sum() for output in outputs]).sum()
        torch.cuda.synchronize()

    with torch.no_grad():
        run(planted=False)
        print("silent", flush=True)
        run(planted=True)
    print("blind")


if __name__ == "__main__":
    main(Path(sys.argv[1]), early=sys.argv[2] == "updates")
