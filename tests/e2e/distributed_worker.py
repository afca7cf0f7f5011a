"""One process of a data-parallel training: run by torchrun from `test_train.py`. Writes its weights and its plan."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import convoy
from convoy.measurement import detect_target
from convoy.perfdb import Database
from convoy.training import tune_step
from convoy.training.allreduce import gradient_allreduce, overlapped_allreduce
from convoy.training.plan_agreement import agree_on_plan
from convoy.training.step import TrainingStep
from tests.e2e.leaving import leave

tune_step.SHARED_DEVICES = ("cpu",)  # as on GPUs: each process measures a share

for module in (gradient_allreduce, overlapped_allreduce):  # several buckets, though the net is small
    module.allreduce_buckets = functools.partial(module.allreduce_buckets, limit=600)


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)  # DistributedDataParallel hands the first process's weights to all
    net = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 4, 3), nn.Flatten(), nn.Linear(144, 5))
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    start = [p.detach().clone() for p in net.parameters()]
    generator = torch.Generator().manual_seed(5)
    x, y = torch.randn(3, 8, 3, 8, 8, generator=generator), torch.arange(24).reshape(3, 8) % 5
    mine = slice(4 * rank, 4 * rank + 4)
    settings = convoy.Settings(db=folder / f"perf.{rank}.db", isolate=False, solver="baseline", only_engines=("aten",))
    step = convoy.training_step(model, cross_entropy, optimizer, (x[0, mine], y[0, mine]), settings=settings)
    assert step.work.overlap is not None
    assert len(step.work.overlap.buckets) > 1
    for index in range(3):
        step(x[index, mine], y[index, mine])

    plan = step.save(folder / f"{rank}.plan.json")

    def once_more() -> tuple[nn.Module, TrainingStep]:
        """The same training from its start, by the same plan."""
        again = copy.deepcopy(net)
        with torch.no_grad():
            for parameter, value in zip(again.parameters(), start, strict=True):
                parameter.copy_(value)
        own = torch.optim.SGD(again.parameters(), lr=0.1, momentum=0.9)
        whole, batch = nn.parallel.DistributedDataParallel(again), (x[0, mine], y[0, mine])
        return again, convoy.training_step(whole, cross_entropy, own, batch, plan=plan, settings=settings)

    late, apart = once_more()
    apart.work.overlap = None  # gradients are averaged when all are there
    for index in range(3):
        apart(x[index, mine], y[index, mine])
    soon, early = once_more()
    early.work.options = dataclasses.replace(early.options, early_updates=True)
    early(x[0, mine], y[0, mine])  # the optimizer has its state
    assert early.program.runnable is not None
    updates = early.work.overlapped_updates()  # each bucket as soon as it is averaged, as in a captured step
    assert updates is not None
    for index in (1, 2):
        with torch.no_grad():
            early.work.run(early.work.leaves((x[index, mine], y[index, mine])), first=True, last=True, updates=updates)
    target = detect_target("cpu")
    for _ in range(50):  # as often as there are models to train in one job
        agreed = agree_on_plan(lambda shares: step.plan, dist.group.WORLD, target)
        assert agreed.steps == step.plan.steps
    with Database.open(folder / f"perf.{rank}.db", shipped=False) as database:
        measured = database.rows()
    found = {
        "start": [p.tolist() for p in start],
        "end": [p.tolist() for p in net.parameters()],
        "apart": [p.tolist() for p in late.parameters()],
        "early": [p.tolist() for p in soon.parameters()],
        "plan": [s.problem for s in step.plan.steps],
        "measured": sorted({row.problem for row in measured}),
    }
    (folder / f"{rank}.json").write_text(json.dumps(found))
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
