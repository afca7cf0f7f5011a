"""A small net, its batches and its optimizer: what the tests of training share. Not a test module."""

from __future__ import annotations

import torch
from torch import nn


class Net(nn.Module):
    """A stem, a shortcut and a classifier."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(8)
        self.conv = nn.Conv2d(8, 8, 3, padding=1)
        self.drop = nn.Dropout(dropout)
        self.fc = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.bn(self.stem(x)))
        x = torch.relu(self.conv(x) + x)
        return self.fc(self.drop(x.mean((2, 3))))


def net(dropout: float = 0.0) -> Net:
    torch.manual_seed(1)
    return Net(dropout)


def batches(count: int, n: int = 4) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [(torch.randn(n, 3, 10, 10, generator=generator), torch.arange(n) % 5) for _ in range(count)]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
