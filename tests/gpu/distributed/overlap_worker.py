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
from convoy.pipeline import schedules
from convoy.pipeline.check import end_to_end
from convoy.tune import local_search
from tests.gpu.program.judge import Judge


def net() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for channels in (3, 64, 64, 64, 64):  # no bias in front of a batch norm: its gradient would be rounding alone
        layers += [nn.Conv2d(channels, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    head = [nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(1024, 8192), nn.ReLU(), nn.Linear(8192, 10)]
    return nn.Sequential(*layers, *head).cuda().to(memory_format=torch.channels_last)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def average(gradient: torch.Tensor) -> None:
    """Put the mean over all processes into it."""
    dist.all_reduce(gradient)
    gradient /= dist.get_world_size()


def check_factors(rank: int, batch: tuple[torch.Tensor, torch.Tensor], settings: convoy.Settings) -> None:
    """Gradients of linear layers from gathered factors, in one graph, are right."""
    module = net()
    judge = Judge(module, sgd)
    model = nn.parallel.DistributedDataParallel(module, device_ids=[rank])
    step = convoy.training_step(model, cross_entropy, sgd(module), batch, gradients="factors", settings=settings)
    assert step.work.factored is not None, step.notes
    for _ in range(6):
        with judge.step(batch) as losses:
            losses.append(step(*batch))
    torch.cuda.synchronize()
    judge.check(average)
    assert step.graph is not None, step.notes
    step.release()


def main(folder: Path) -> None:
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    end_to_end.is_faster = lambda *_: True  # the plan that was chosen is kept, whatever the clock says
    schedules._shares = lambda _: ()  # nor is anything held back because the device is full: there are several streams
    local_search.QUICK_COMPILED_CONFIGS = 0  # one setting of each engine is measured: a compiler's second each
    few = ("triton.implicit_gemm", "triton.dgrad", "triton.wgrad")
    settings = convoy.Settings(
        db=folder / f"perf.{rank}.db", isolate=False, streams=3, stream_memory=4.0, deterministic=True, only_engines=few
    )
    x = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(rank)).cuda()
    x, y = x.contiguous(memory_format=torch.channels_last), (torch.arange(8) % 10).cuda()
    ends: dict[str, list[float]] = {}
    graphs: list[bool] = []
    streams: list[int] = []
    plan: Path | None = None
    for label in ("overlapped", "apart"):
        module = net()
        judge = Judge(module, sgd)
        model = nn.parallel.DistributedDataParallel(module, device_ids=[rank])
        step = convoy.training_step(model, cross_entropy, sgd(module), (x, y), plan=plan, settings=settings)
        assert not step.plan.baseline, step.notes
        if label == "apart":
            step.work.overlap = None
        else:
            assert step.work.overlap is not None
            assert len(step.work.overlap.buckets) > 1
        for _ in range(6):
            with judge.step((x, y)) as losses:
                losses.append(step(x, y))
        torch.cuda.synchronize()
        judge.check(average)
        graphs.append(step.graph is not None)
        streams.append(1 + max(one.stream for one in step.plan.steps))
        plan = step.save(folder / f"{rank}.plan.json")
        ends[label] = torch.cat([p.detach().flatten() for p in module.parameters()]).double().cpu()[::997].tolist()
    if dist.get_world_size() > 1:
        check_factors(rank, (x, y), settings)
    (folder / f"{rank}.json").write_text(json.dumps({"ends": ends, "graphs": graphs, "streams": streams}))
    assert step.graph is not None
    dist.destroy_process_group()  # with the step in reach: NCCL would wait for its graph for ever
    assert step.graph is None


if __name__ == "__main__":
    main(Path(sys.argv[1]))
