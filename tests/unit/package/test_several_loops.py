"""Kernels that call others in a package: a team meets between two loops, and each thread has rows of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import convoy
from convoy.pipeline import net
from tests.unit.package.conftest import seeded, stock
from tests.unit.pipeline.untimed import plans_kept

X = torch.randn(2, 12, 29, 15, generator=torch.Generator().manual_seed(1))
ENGINES = ("cpu.direct", "cpu.layout", "cpu.pooling")


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


class Inverted(nn.Module):
    """MobileNetV2's block: widen, filter, narrow."""

    def __init__(self) -> None:
        super().__init__()
        self.widen, self.narrow = nn.Conv2d(12, 72, 1), nn.Conv2d(72, 12, 1)
        self.depthwise = nn.Conv2d(72, 72, 3, padding=1, groups=72)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[n, 12, h, w] to the same."""
        return self.narrow(torch.relu(self.depthwise(torch.relu(self.widen(x))))) + x


CASES = {Gate: {"cpu.depthwise_mean", "cpu.gated_1x1"}, Inverted: {"cpu.banded"}}


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("kind", CASES)
def test_a_team_gives_the_bits_of_one_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[nn.Module], threads: int
) -> None:
    monkeypatch.setattr(net, "LEAST_INSIDE", 1)
    model = seeded(kind)
    settings = convoy.Settings(effort="none", only_engines=(*ENGINES, *sorted(CASES[kind])))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        with plans_kept():
            fast = convoy.optimize(model, (X,), settings=settings)
            path = convoy.export(model, tmp_path / "net.convoy", (X,), settings=settings, portable=True)
        assert CASES[kind] <= {step.config.engine for step in fast.plan.steps}
        torch.testing.assert_close(fast(X).double(), stock(kind, X), rtol=1e-4, atol=1e-5)
        opened = convoy.open(path, trust=True)
        wanted = fast(X)
        assert all(torch.equal(opened(X), wanted) for _ in range(50))
    finally:
        torch.set_num_threads(before)
