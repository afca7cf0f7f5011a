"""One process of a training in bf16 whose gradients travel in several buckets: run by torchrun from `test_buckets.py`.

python buckets_worker.py FOLDER
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import convoy
from convoy.pipeline.check import end_to_end
from convoy.training.allreduce import gradient_allreduce, overlapped_allreduce, sent_gradients
from convoy.training.allreduce.bf16_allreduce import Bf16AllReduce
from tests.e2e.leaving import leave

LIMIT = 3000
"""Bytes of a bucket: two weights of the net."""

for module in (gradient_allreduce, overlapped_allreduce):
    module.allreduce_buckets = functools.partial(module.allreduce_buckets, limit=LIMIT)
sent_gradients.collectives = functools.partial(sent_gradients.collectives, limit=LIMIT)
end_to_end.is_faster = lambda result, baseline: True  # whatever the clock says


def net() -> nn.Module:
    layers = [layer for _ in range(5) for layer in (nn.Conv2d(6, 6, 3, padding=1, bias=False), nn.ReLU())]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(384, 5))


def check_compressed(
    gradients: Any, batch: tuple[torch.Tensor, ...], model: nn.Module, plan: Path, settings: convoy.Settings
) -> None:
    """Gradients that are sent in bf16 are PyTorch's within rounding, also with updates during the backward pass."""
    stock, late, early = (nn.parallel.DistributedDataParallel(copy.deepcopy(model)) for _ in range(3))
    with torch.autocast("cpu", torch.bfloat16):
        loss = cross_entropy(stock(batch[0]), batch[1])
    loss.backward()
    for net, soon in ((late, False), (early, True)):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
        step = convoy.training_step(
            net, cross_entropy, optimizer, batch, amp=torch.bfloat16, gradients=gradients, plan=plan, settings=settings
        )
        assert isinstance(step.work.update.averages, Bf16AllReduce)
        assert step.work.overlap is not None
        if soon:
            step.work.options = dataclasses.replace(step.work.options, early_updates=True)
            with torch.no_grad():
                updates = step.work.overlapped_updates()
                assert updates is not None
                step.work.run(step.work.leaves(batch), first=True, last=True, updates=updates)
        else:
            step(*batch)
    for one, other, theirs in zip(late.parameters(), early.parameters(), stock.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
        assert torch.equal(one.grad, one.grad.bfloat16().float())
        torch.testing.assert_close(one.grad, theirs.grad, rtol=2**-7, atol=1e-4 * theirs.grad.abs().max().item())


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(3)
    model = nn.parallel.DistributedDataParallel(net())
    stock = nn.parallel.DistributedDataParallel(copy.deepcopy(model.module))
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, stock))
    generator = torch.Generator().manual_seed(5)
    x, y = torch.randn(3, 8, 6, 8, 8, generator=generator), torch.arange(24).reshape(3, 8) % 5
    mine = slice(4 * rank, 4 * rank + 4)
    batch = (x[0, mine], y[0, mine])
    settings = convoy.Settings(
        db=folder / f"{rank}.db", isolate=False, only_engines=("foreach",), effort=convoy.Effort.NONE
    )
    step = convoy.training_step(model, cross_entropy, ours, batch, amp=torch.bfloat16, settings=settings)
    cast = [one.nodes for one in step.plan.steps if one.pattern == "casts"]
    for index in range(3):
        step(x[index, mine], y[index, mine])
        theirs.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = cross_entropy(stock(x[index, mine]), y[index, mine])
        loss.backward()
        theirs.step()
    for one, other in zip(model.parameters(), stock.parameters(), strict=True):
        assert torch.equal(one, other)
    assert step.work.overlap is not None
    assert len(step.work.overlap.buckets) > 3
    assert len([nodes for nodes in cast if len(nodes) == 2]) > 1, cast  # of weights' gradients, bucket by bucket
    plan = step.save(folder / f"{rank}.plan.json")
    alone = copy.deepcopy(stock.module)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    again = convoy.training_step(
        alone, cross_entropy, optimizer, batch, amp=torch.bfloat16, plan=plan, settings=settings
    )
    assert [one.nodes for one in again.plan.steps if one.pattern == "casts"] == cast
    for gradients in ("bf16", "bf16_error_feedback"):
        check_compressed(gradients, batch, stock.module, plan, settings)
    (folder / f"{rank}.done").touch()
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
