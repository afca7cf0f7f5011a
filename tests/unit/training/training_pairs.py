"""A step and the loop that PyTorch's users write, from the same start: what tests of training_step share. Not a test module."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

import convoy
from convoy.training.step import TrainingStep

Factory = Callable[[], nn.Module]
Optimizer = Callable[[list[Any]], torch.optim.Optimizer]


class Net(nn.Module):
    """A convolution, a batch norm, a classifier. No bias before the batch norm: its gradient would be rounding alone."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, bias=False)
        self.bn = nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(torch.relu(self.bn(self.conv(x))).mean((2, 3)))


def images() -> torch.Tensor:
    return torch.randn(4, 3, 9, 9, generator=torch.Generator().manual_seed(3))


def labels() -> torch.Tensor:
    return torch.tensor([0, 3, 1, 4])


def sgd(parameters: list[Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def called(model: nn.Module, x: Any) -> Any:
    """The model's output, as the documentation says that x is given."""
    if isinstance(x, tuple):
        return model(*x)
    return model(**x) if isinstance(x, Mapping) else model(x)


@dataclass
class Pair:
    """Models, losses and optimizers of the same start, one trained by `step`, one by PyTorch's loop."""

    model: nn.Module
    stock: nn.Module
    loss_fn: Any
    stock_loss: Any
    step: TrainingStep
    optimizer: torch.optim.Optimizer
    stock_optimizer: torch.optim.Optimizer
    amp: torch.dtype | None = None
    call: Callable[[nn.Module, Any], Any] = called

    def train(self, *batches: tuple[Any, ...], rtol: float = 1e-4, atol: float = 1e-5) -> None:
        """Train both on batches, and compare losses, parameters, buffers, and which parameters have a gradient."""
        for index, (x, *targets) in enumerate(batches):
            own = pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, x)
            torch.manual_seed(index)
            loss = self.step(x, *targets)
            torch.manual_seed(index)
            self.stock_optimizer.zero_grad()
            with torch.autocast("cpu", self.amp) if self.amp else contextlib.nullcontext():
                wanted = self.stock_loss(self.call(self.stock, own), *targets)
            wanted.backward()
            self.stock_optimizer.step()
            torch.testing.assert_close(loss, wanted.detach(), rtol=rtol, atol=atol)
        parts = [(self.model, self.stock)]
        if isinstance(self.loss_fn, nn.Module):
            parts.append((self.loss_fn, self.stock_loss))
        for mine, theirs in parts:
            for (name, found), value in zip(mine.state_dict().items(), theirs.state_dict().values(), strict=True):
                torch.testing.assert_close(found, value, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")
            for (name, found), other in zip(mine.named_parameters(), theirs.parameters(), strict=True):
                assert (found.grad is None) == (other.grad is None), name


def pair(
    make: Factory,
    loss: Callable[[nn.Module], Any],
    batch: tuple[Any, ...],
    settings: convoy.Settings,
    *,
    optimizer: Optimizer = sgd,
    amp: torch.dtype | None = None,
    call: Callable[[nn.Module, Any], Any] = called,
) -> Pair:
    """Both sides of a comparison; `loss` makes a loss for a model, for one may read the other's weights."""
    made: list[tuple[nn.Module, Any, torch.optim.Optimizer]] = []
    for _ in range(2):
        torch.manual_seed(0)
        model = make()
        loss_fn = loss(model)
        held = list(loss_fn.parameters()) if isinstance(loss_fn, nn.Module) else []
        made.append((model, loss_fn, optimizer([*model.parameters(), *held])))
    (model, loss_fn, mine), (stock, stock_loss, theirs) = made
    step = convoy.training_step(model, loss_fn, mine, batch, amp=amp, settings=settings)
    return Pair(model, stock, loss_fn, stock_loss, step, mine, theirs, amp, call)
