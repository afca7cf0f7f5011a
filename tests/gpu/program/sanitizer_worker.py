"""A training step on several streams under PyTorch's CUDA stream sanitizer: run by `test_sanitizer.py`. Not a test module.

    python sanitizer_worker.py FOLDER whole|planted

PyTorch's operators alone run, for the sanitizer sees no others. `planted` takes the waits for other streams away.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import torch
import torch.cuda._sanitizer as sanitizer
from torch import nn
from torch.nn.functional import cross_entropy

import convoy
from convoy.capture import capture_training
from convoy.perfdb import Database
from convoy.pipeline.choice import make_plan, select
from convoy.pipeline.stages import input_formats, make_net, measure, silent, target_for
from convoy.plan import parallel
from convoy.program import bind
from convoy.program.streamed import StreamedProgram


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


def main(folder: Path, planted: bool) -> None:
    torch.manual_seed(0)
    model = Branches().cuda()
    batch = (torch.randn(4, 3, 16, 16, device="cuda"), torch.arange(4, device="cuda"))
    settings = convoy.Settings(db=folder / "perf.db", isolate=False, solver="baseline", only_engines=("aten",))
    capture = capture_training(model, cross_entropy, batch)
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    inputs = [
        *(parameters[name].detach() for name in capture.parameters),
        *(buffers[name] for name in capture.buffers),
        *batch,
    ]
    border = input_formats(capture.captured, inputs)
    net = make_net("branches", capture.captured, border, "nchw", settings, target_for("cuda"))
    with Database.open(settings.db) as database:
        found = measure(net, settings, database, silent)
    plan = make_plan(net, select(net, found, settings), settings)
    steps = parallel(plan.steps, 3)
    assert {step.stream for step in steps} == {0, 1, 2}
    torch.cuda.synchronize()
    sanitizer.enable_cuda_sanitizer()  # not before: the measurements capture graphs, which it does not follow
    spread = dataclasses.replace(plan, steps=steps)
    with torch.no_grad():
        bound = bind(spread, net.captured, net.regions_by_nodes, net.target)
        if planted:
            for one in bound.steps:
                one.step = dataclasses.replace(one.step, waits=())
        program = StreamedProgram(bound, torch.device("cuda", 0))
        for _ in range(3):
            outputs = program(inputs)
            torch.stack([output.float().sum() for output in outputs]).sum()
    torch.cuda.synchronize()
    print("silent")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] == "planted")
