"""One process of a data-parallel training on GPUs: run by torchrun from `test_overlap.py`. Not a test module."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import convoy
from convoy.measurement import task
from convoy.pipeline import verdict


def net() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU()]
    for _ in range(4):
        layers += [nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU()]
    head = [nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(1024, 8192), nn.ReLU(), nn.Linear(8192, 10)]
    return nn.Sequential(*layers, *head).cuda().to(memory_format=torch.channels_last)


def main(folder: Path) -> None:
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    verdict.is_faster = lambda *_: True  # the plan that was chosen is kept, whatever the clock says
    task.QUICK_COMPILED = 0  # one setting of each engine is measured: a compiler's second each
    few = ("triton.implicit_gemm", "triton.dgrad", "triton.wgrad")
    settings = convoy.Settings(
        db=folder / f"perf.{rank}.db", isolate=False, streams=3, deterministic=True, only_engines=few
    )
    x = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(rank)).cuda()
    x, y = x.contiguous(memory_format=torch.channels_last), (torch.arange(8) % 10).cuda()
    ends: dict[str, list[float]] = {}
    graphs: list[bool] = []
    plan: Path | None = None
    for label in ("overlapped", "apart"):
        module = net()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
        model = nn.parallel.DistributedDataParallel(module, device_ids=[rank])
        step = convoy.training_step(model, cross_entropy, optimizer, (x, y), plan=plan, settings=settings)
        if label == "apart":
            step._overlap = None
        else:
            assert step._overlap is not None
            assert len(step._overlap._buckets) > 1
        for _ in range(6):
            step(x, y)
        torch.cuda.synchronize()
        graphs.append(step._graph is not None)
        plan = step.save(folder / f"{rank}.plan.json")
        ends[label] = torch.cat([p.detach().flatten() for p in module.parameters()]).double().cpu()[::997].tolist()
    stock = net()
    optimizer = torch.optim.SGD(stock.parameters(), lr=0.05, momentum=0.9)
    model = nn.parallel.DistributedDataParallel(stock, device_ids=[rank])
    for _ in range(6):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    ends["stock"] = torch.cat([p.detach().flatten() for p in stock.parameters()]).double().cpu()[::997].tolist()
    (folder / f"{rank}.json").write_text(json.dumps({"ends": ends, "graphs": graphs}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
