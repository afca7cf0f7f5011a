"""A small net with branches, its batches and its optimizers: what tests of training on a GPU share. Not a test module."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from convoy.pipeline.check import end_to_end
from convoy.tune import local_search

FEW = ("triton.implicit_gemm", "triton.dgrad", "triton.wgrad")
"""Engines enough for a program of our own kernels; tuning is tested elsewhere, and each more costs a compiler's seconds."""


class Branches(nn.Module):
    """Two inception blocks behind a stem, with batch norms: weight gradients and branches hang off the chain.

    No convolution has a bias in front of a batch norm: its gradient would be rounding alone, with which nothing can be compared.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU())
        for block in range(2):
            self.add_module(f"a{block}", nn.Conv2d(32, 16, 1))
            self.add_module(f"b{block}", nn.Sequential(nn.Conv2d(32, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)))
        self.fc = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in range(2):
            x = torch.relu(torch.cat([self.get_submodule(f"{part}{block}")(x) for part in "ab"], 1))
        return self.fc(x.mean((2, 3)))


def net() -> nn.Module:
    torch.manual_seed(1)
    return Branches().cuda().to(memory_format=torch.channels_last)


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)
    made = [torch.randn(8, 3, 24, 24, generator=generator) for _ in range(count)]
    labels = (torch.arange(8) % 10).cuda()
    return [(x.cuda().contiguous(memory_format=torch.channels_last), labels) for x in made]


def micro_batches(count: int, each: int) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """So many updates' batches."""
    given = batches(count * each)
    return [given[index : index + each] for index in range(0, len(given), each)]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def keep_ours(patch: pytest.MonkeyPatch) -> None:
    """The chosen plan is kept, whatever the clock says; one setting of each engine is measured: a compiler's second each."""
    patch.setattr(end_to_end, "is_faster", lambda *_: True)
    patch.setattr(local_search, "QUICK_COMPILED_CONFIGS", 0)
