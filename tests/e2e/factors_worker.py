"""One process of a training whose linear gradients are multiplied from gathered factors: run by torchrun from `test_factors.py`.

python factors_worker.py FOLDER
"""

from __future__ import annotations

import copy
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import convoy
from convoy.pipeline.check import end_to_end
from convoy.training.allreduce.gathered_factors import GatheredFactors
from tests.e2e.leaving import leave

end_to_end.is_faster = lambda *_: True  # whatever the clock says


def net() -> nn.Module:
    torch.manual_seed(3)
    head = [nn.Flatten(), nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 64, bias=False), nn.ReLU(), nn.Linear(64, 5)]
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), *head)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.double() for parameter in model.parameters()]


def average(model: nn.Module, batches: list[tuple[torch.Tensor, torch.Tensor]], amp: torch.dtype | None = None):
    """The average of all processes' gradients: in float64, or PyTorch's under autocast."""
    own = copy.deepcopy(model) if amp else copy.deepcopy(model).double()
    sums = [torch.zeros_like(p, dtype=torch.float64) for p in own.parameters()]
    for x, y in batches:
        with torch.autocast("cpu", amp, enabled=amp is not None):
            loss = cross_entropy(own(x if amp else x.double()), y)
        for total, gradient in zip(sums, torch.autograd.grad(loss, list(own.parameters())), strict=True):
            total += gradient.double() / len(batches)
    return sums


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Relative L2 distance."""
    return ((found - exact).norm() / exact.norm()).item()


def check(folder: Path, amp: torch.dtype | None) -> None:
    """Steps of even batches, then one whose batches differ, then one with a hook in one process, then even ones again."""
    rank, size = dist.get_rank(), dist.get_world_size()
    draw = torch.Generator().manual_seed(5)
    model = net()
    step = convoy.training_step(
        nn.parallel.DistributedDataParallel(model), cross_entropy, sgd(model), (torch.zeros(4, 3, 8, 8), torch.arange(4)),
        amp=amp, gradients="factors", settings=convoy.Settings(db=folder / f"{rank}.db", effort="none"),
    )  # fmt: skip
    assert not step.plan.baseline, step.notes
    assert isinstance(step.work.update.averages, GatheredFactors)
    assert step.work.factored is not None
    assert len(step.work.factored.overlap._products) >= 2
    gathered: list[int] = []
    begin = GatheredFactors.begin_product

    def counted(self: GatheredFactors, *args: object):
        gathered.append(1)
        return begin(self, *args)

    GatheredFactors.begin_product = counted
    called: list[int] = []
    for kind in ("even", "even", "uneven", "hooked", "even"):
        rows = [3 if kind == "uneven" and one else 4 for one in range(size)]
        batches = [(torch.randn(n, 3, 8, 8, generator=draw), torch.randint(5, (n,), generator=draw)) for n in rows]
        expected = average(model, batches)
        rounded = average(model, batches, amp) if amp else expected
        hook = model[3].weight.register_hook(called.append) if kind == "hooked" and rank == 0 else None
        gathered.clear()
        with nullcontext() if kind != "uneven" else ignored():
            step(*batches[rank])
        assert bool(gathered) == (kind == "even"), kind
        for found, exact, theirs in zip(gradients(model), expected, rounded, strict=True):
            assert error(found, exact) <= 1e-5 + 1.5 * error(theirs, exact), (kind, found.shape)
        if hook is not None:
            hook.remove()
            assert called
    GatheredFactors.begin_product = begin


def ignored():
    """The stock step's warning of another batch."""
    import warnings

    return warnings.catch_warnings(action="ignore")


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    check(folder, None)
    check(folder, torch.bfloat16)
    (folder / f"{dist.get_rank()}.done").touch()
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
