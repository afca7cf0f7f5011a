"""cuda.gated_1x1 on the GPU: every setting within bounds, the same bits in every replay, and chosen in a net."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import convoy
from convoy.engines.gates.gated_1x1 import ENGINE
from convoy.measurement.device.detect import detect_target
from convoy.target import Target
from convoy.zoo import load_model
from tests.gpu.engines.subgraph_checks import assert_every_setting_is_right, assert_replays_give_the_same_bits
from tests.unit.engines import gated_1x1_cases
from tests.unit.engines.gated_1x1_cases import piece

pytestmark = pytest.mark.gpu

BOTH = (True, True)
SHAPES = {
    **gated_1x1_cases.CASES,
    "efficientnet, first block": ((1, 32, 8, 112, 112, "fp16", "silu", "sigmoid", BOTH), 16, True, ""),
    "efficientnet, batch of 32": ((32, 144, 6, 56, 56, "fp16", "silu", "sigmoid", BOTH), 24, True, "add"),
    "efficientnet, bf16": ((8, 240, 10, 28, 28, "bf16", "silu", "sigmoid", BOTH), 40, True, "add"),
    "mobilenet, batch of 7": ((7, 120, 32, 28, 28, "fp16", "relu", "hardsigmoid", BOTH), 40, True, "add"),
    "batch of 300": ((300, 72, 24, 5, 5, "fp16", "relu", "hardsigmoid", BOTH), 40, True, "add relu"),
}


@pytest.fixture(scope="module")
def target() -> Target:
    return detect_target("cuda")


@pytest.fixture(autouse=True)
def shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gated_1x1_cases, "CASES", SHAPES)


@pytest.mark.parametrize("name", SHAPES)
def test_every_setting_is_right(name: str, target: Target):
    assert_every_setting_is_right(ENGINE, piece(name), target)


@pytest.mark.parametrize("name", ["efficientnet, first block", "efficientnet, batch of 32", "batch of 300"])
def test_replays_of_a_graph_give_the_same_bits(name: str, target: Target):
    assert_replays_give_the_same_bits(ENGINE, piece(name), target)


def test_a_net_uses_it_and_follows_pytorch(tmp_path: Path):
    model = load_model("efficientnet_b0").eval().cuda().half()
    x = torch.randn(32, 3, 224, 224, device="cuda", dtype=torch.half)
    fast = convoy.optimize(model, (x,), settings=convoy.Settings(effort="none", db=tmp_path / "perf.db"))
    assert any(step.config.engine == ENGINE.id for step in fast.plan.steps)
    with torch.no_grad():
        exact = model.double()(x.double())
        model.half()
        fast.refresh()
        error = (fast(x).double() - exact).norm() / exact.norm()
        stock = (model(x).double() - exact).norm() / exact.norm()
    assert error < 2 * stock + 1e-3
