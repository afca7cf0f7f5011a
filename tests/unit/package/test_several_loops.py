"""A kernel of two loops in a package: its team of threads meets between them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import convoy
from tests.unit.package.conftest import seeded, stock
from tests.unit.pipeline.untimed import plans_kept

X = torch.randn(2, 12, 29, 15, generator=torch.Generator().manual_seed(1))
ENGINES = ("cpu.direct", "cpu.depthwise_mean", "cpu.gated_1x1", "cpu.layout", "cpu.pooling")


class Gate(nn.Module):
    """MobileNetV3's block: widen, filter, squeeze and excite, narrow."""

    def __init__(self) -> None:
        super().__init__()
        self.widen, self.narrow = nn.Conv2d(12, 72, 1), nn.Conv2d(72, 12, 1)
        self.depthwise = nn.Conv2d(72, 72, 3, padding=1, groups=72)
        self.squeeze, self.excite = nn.Conv2d(72, 6, 1), nn.Conv2d(6, 72, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[n, 12, h, w] to the same."""
        y = nn.functional.silu(self.depthwise(nn.functional.silu(self.widen(x))))
        gate = torch.sigmoid(self.excite(torch.relu(self.squeeze(y.mean((2, 3), keepdim=True)))))
        return self.narrow(y * gate) + x


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_team_gives_the_bits_of_one_thread(tmp_path: Path, threads: int) -> None:
    model = seeded(Gate)
    settings = convoy.Settings(effort="none", only_engines=ENGINES)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        with plans_kept():
            fast = convoy.optimize(model, (X,), settings=settings)
            path = convoy.export(model, tmp_path / "net.convoy", (X,), settings=settings, portable=True)
        assert {"cpu.depthwise_mean", "cpu.gated_1x1"} <= {step.config.engine for step in fast.plan.steps}
        torch.testing.assert_close(fast(X).double(), stock(Gate, X), rtol=1e-4, atol=1e-5)
        net = convoy.open(path, trust=True)
        wanted = fast(X)
        assert all(torch.equal(net(X), wanted) for _ in range(50))
    finally:
        torch.set_num_threads(before)
