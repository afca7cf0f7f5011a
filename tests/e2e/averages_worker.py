"""One of several processes that average gradients: started by `test_averages.py`, which reads what it says."""

from __future__ import annotations

import functools
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from convoy.training.allreduce import gradient_allreduce
from convoy.training.allreduce.gradient_allreduce import allreduce_gradients
from convoy.training.allreduce.sent_gradients import make_allreduce

STEPS = 32
LIMIT = 400
"""Bytes of a bucket: the gradients below are in three, of fp32, and one of fp64."""

ROUNDING = 2.0**-9
"""Relative error of one rounding to bf16."""


def gradients(rank: int) -> list[torch.Tensor]:
    """One process's gradients, the same in every step."""
    draw = torch.Generator().manual_seed(rank)
    return [
        torch.randn(4, 3, 3, 2, generator=draw).to(memory_format=torch.channels_last),
        torch.randn(5, generator=draw),
        torch.randn(6, 7, generator=draw),
        torch.randn(11, 13, generator=draw).t(),
        torch.randn(3, generator=draw, dtype=torch.float64),
    ]


def averages(kind: str | None, steps: int) -> list[list[torch.Tensor]]:
    """The averages of each step."""
    averaging = make_allreduce(dist.group.WORLD, torch.device("cpu"), kind)
    found = []
    for _ in range(steps):
        given = gradients(dist.get_rank())
        allreduce_gradients(given, averaging)
        found.append(given)
    return found


def check(size: int) -> None:
    """Compare with averages in fp64, and with what stands in PyTorch's documentation."""
    everyone = [gradients(rank) for rank in range(size)]
    exact = [torch.stack([g.double() for g in same]).mean(0) for same in zip(*everyone, strict=True)]
    total = [torch.stack([g.double().abs() for g in same]).sum(0) for same in zip(*everyone, strict=True)]

    def error(found: list[torch.Tensor]) -> float:
        """Largest error, in roundings of the sum of all processes' magnitudes; of fp32 gradients."""
        pairs = zip(found[:4], exact, total, strict=False)
        return max(((f.double() - e).abs() / (ROUNDING * t)).max().item() for f, e, t in pairs)

    own = averages(None, 1)[0]
    assert error(own) < 1e-3
    for kind in ("bf16", "bf16_error_feedback"):
        found = averages(kind, STEPS)
        assert [g.stride() for g in found[0]] == [g.stride() for g in own]
        assert torch.equal(found[0][4], own[4])  # fp64 is sent as it is
        for step in (found[0], found[-1]):
            for gradient in step:
                flat = gradient.contiguous().double()
                first = flat.clone()
                dist.broadcast(first, 0)
                assert torch.equal(flat, first)  # the same bits in every process
        mean = [torch.stack(same).double().mean(0) for same in zip(*found, strict=True)]
        if kind == "bf16":
            assert 0.01 < error(found[0]) <= 1.01
            assert error(mean) == error(found[0])  # the same bias in every step
        else:
            assert 0.01 < error(found[0]) <= 1.01
            assert error(mean) < 3 / STEPS  # of the last step alone


def main(rank: int, size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    gradient_allreduce.allreduce_buckets = functools.partial(gradient_allreduce.allreduce_buckets, limit=LIMIT)
    try:
        dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), size), rank=rank, world_size=size)
        check(size)
        dist.barrier()
        said = "right"
    except BaseException:
        said = traceback.format_exc()
    (folder / f"{rank}.txt").write_text(said)
