"""A training step of a model that checkpoints its activations: one step is one update of the running statistics."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import convoy
from tests.unit.program.fast_net import always_kept

X = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(2))
Y = torch.tensor([0, 1, 2, 3])
STEPS = 3


class Checkpointed(nn.Module):
    """A block with a batch norm, computed again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.recomputes = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = checkpoint(self.block, x, use_reentrant=False) if self.recomputes else self.block(x)
        return y.mean((2, 3))


def trained(model: nn.Module) -> nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        cross_entropy(model(X), Y).backward()
        optimizer.step()
    return model


def test_running_statistics_are_updated_once_a_step(tmp_path_factory: pytest.TempPathFactory):
    """PyTorch's own loop counts each batch twice, because the recomputation is a second forward pass in training mode."""
    torch.manual_seed(0)
    model = Checkpointed()
    twice, once = trained(copy.deepcopy(model)), copy.deepcopy(model)
    once.recomputes = False
    trained(once)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = convoy.Settings(effort="none", db=tmp_path_factory.mktemp("checkpointed") / "perf.db")
    with always_kept(), warnings.catch_warnings():
        warnings.simplefilter("error")
        step = convoy.training_step(model, cross_entropy, optimizer, (X, Y), settings=settings)
        for _ in range(STEPS):
            step(X, Y)
    assert not step.plan.baseline
    for (name, found), wanted in zip(model.named_parameters(), twice.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    for name, wanted in once.named_buffers():
        torch.testing.assert_close(model.get_buffer(name), wanted, rtol=1e-4, atol=1e-5)
    counts = [int(net.get_buffer("block.1.num_batches_tracked")) for net in (model, once, twice)]
    assert counts == [STEPS, STEPS, 2 * STEPS]
