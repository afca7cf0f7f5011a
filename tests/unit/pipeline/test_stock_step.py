"""PyTorch's step in float64: in nchw and without autocast, whatever the model's memory format is."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from training_nets import batches, net

from convoy.pipeline.stock_step import StockStep

SEEN: list[tuple[bool, bool, torch.dtype]] = []


class Watched(nn.Module):
    """A net that notes the memory formats and the dtype of its images and weights."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        SEEN.append((x.is_contiguous(), self.net.stem.weight.is_contiguous(), x.dtype))
        return self.net(x)


def test_the_exact_step_is_in_nchw_and_leaves_the_stock_one_as_it_is():
    model = Watched().to(memory_format=torch.channels_last)
    ((x, y),) = batches(1)
    stock = StockStep(model, cross_entropy, torch.bfloat16, (x.to(memory_format=torch.channels_last), y), scaled=False)
    SEEN.clear()
    exact, own = stock.exact(), stock.run()
    wide, stock_own = SEEN
    assert wide == (True, True, torch.float64)
    assert stock_own == (False, False, torch.float32)
    assert all(t.dtype == torch.float64 for t in exact)
    errors = [float((a - b).norm() / a.norm()) for a, b in zip(exact, own, strict=True)]
    assert 0.0 < max(errors) < 0.1  # bf16's
