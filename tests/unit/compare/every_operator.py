"""A net that has every operator of `convoy.compare.nets` once or more: as a module, and over a framework's operators."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from convoy.compare.nets.operators import Operators


class EveryOperator(nn.Module):
    """[n, 3, 17, 17] to [n, 5]; the input is changed first, as torchvision's GoogLeNet does with trained weights."""

    transform_input = True

    def __init__(self) -> None:
        super().__init__()
        self.first, self.first_norm = nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8, 1e-3)
        self.wide = nn.Conv2d(8, 12, (1, 7), padding=(0, 3))
        self.depthwise, self.depthwise_norm = nn.Conv2d(12, 12, 3, 2, 1, groups=12, bias=False), nn.BatchNorm2d(12)
        self.narrow, self.expand = nn.Conv2d(12, 4, 1), nn.Conv2d(4, 12, 1)
        self.grouped = nn.Conv2d(12, 12, 3, padding=1, groups=3)
        self.hidden, self.head = nn.Linear(24 * 2 * 2, 24), nn.Linear(24, 5)
        for norm in (self.first_norm, self.depthwise_norm):  # far from 0 and 1, and so that ReLU6 has something to cut
            nn.init.uniform_(norm.running_mean, -0.1, 0.1)
            nn.init.uniform_(norm.running_var, 0.002, 0.004)
            nn.init.uniform_(norm.weight, 1.0, 4.0)
            nn.init.uniform_(norm.bias, 0.0, 1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The logits."""
        means, stds = x.new_tensor((0.485, 0.456, 0.406)), x.new_tensor((0.229, 0.224, 0.225))
        x = x * (stds / 0.5)[:, None, None] + ((means - 0.5) / 0.5)[:, None, None]
        x = self.first_norm(self.first(x)).relu()
        x = functional.max_pool2d(functional.pad(x, (1, 1, 1, 1), value=-torch.inf), 3, 1)
        x = functional.silu(self.wide(x))
        x = functional.relu6(self.depthwise_norm(self.depthwise(x)))
        gate = torch.sigmoid(self.expand(functional.silu(self.narrow(x.mean((2, 3), keepdim=True)))))
        x = x + self.grouped(x * gate)
        x = torch.cat([functional.avg_pool2d(x, 3, 1, 1), x], 1)
        pooled = functional.max_pool2d(functional.pad(x.relu(), (0, 1, 0, 1), value=-torch.inf), 3, 3)
        return self.head(x.mean((2, 3)) + self.hidden(pooled.flatten(1)))


def every_operator(ops: Operators, x: Any) -> Any:
    """`EveryOperator` over the operators of a framework."""
    x = ops.relu(ops.batch_norm(ops.conv(x, "first", 2, 1), "first_norm", 1e-3))
    x = ops.max_pool(x, 3, 1, 1, 1)
    x = ops.silu(ops.conv(x, "wide", 1, (0, 3)))
    x = ops.relu6(ops.batch_norm(ops.conv(x, "depthwise", 2, 1), "depthwise_norm", 1e-5))
    gate = ops.sigmoid(ops.conv(ops.silu(ops.conv(ops.mean(x, keep=True), "narrow")), "expand"))
    x = ops.add(x, ops.conv(ops.multiply(x, gate), "grouped", 1, 1))
    x = ops.concat([ops.avg_pool(x, 3, 1, 1), x])
    y = ops.max_pool(ops.relu(x), 3, 3, 0, 6 - ops.height(x))
    y = ops.linear(ops.flatten(y), "hidden")
    return ops.linear(ops.add(ops.mean(x), y), "head")
