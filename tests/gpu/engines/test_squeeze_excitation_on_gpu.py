"""cuda.squeeze_excitation on the GPU: every setting within bounds, the same bits in every replay, and chosen in a net."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import convoy
from convoy.engines.gates.squeeze_excitation import ENGINE
from convoy.measurement.device.detect import detect_target
from convoy.target import Target
from convoy.zoo import load_model
from tests.gpu.engines.subgraph_checks import assert_every_setting_is_right, assert_replays_give_the_same_bits
from tests.unit.engines import squeeze_excitation_cases
from tests.unit.engines.squeeze_excitation_cases import block

pytestmark = pytest.mark.gpu

BOTH = (True, True)
SHAPES = {
    **squeeze_excitation_cases.CASES,
    "efficientnet, first block": (1, 32, 8, 112, 112, "fp16", "silu", "sigmoid", BOTH, ""),
    "efficientnet, last block": (1, 1152, 48, 7, 7, "fp16", "silu", "sigmoid", BOTH, ""),
    "efficientnet, batch of 32": (32, 240, 10, 28, 28, "fp16", "silu", "sigmoid", BOTH, ""),
    "seresnet, batch of 8": (8, 2048, 128, 7, 7, "bf16", "relu", "sigmoid", BOTH, "add relu"),
    "regnet": (4, 1512, 144, 7, 7, "fp16", "relu", "sigmoid", BOTH, ""),
    "batch of 300": (300, 72, 24, 5, 5, "fp32", "relu", "hardsigmoid", BOTH, ""),
}


@pytest.fixture(scope="module")
def target() -> Target:
    return detect_target("cuda")


@pytest.fixture(autouse=True)
def shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(squeeze_excitation_cases, "CASES", SHAPES)


@pytest.mark.parametrize("name", SHAPES)
def test_every_setting_is_right(name: str, target: Target):
    assert_every_setting_is_right(ENGINE, block(name), target)


@pytest.mark.parametrize("name", ["efficientnet, first block", "seresnet, batch of 8", "regnet"])
def test_replays_of_a_graph_give_the_same_bits(name: str, target: Target):
    assert_replays_give_the_same_bits(ENGINE, block(name), target)


@pytest.mark.parametrize("net", ["efficientnet_b0", "mobilenet_v3_small"])
def test_a_net_uses_it_and_follows_pytorch(net: str, tmp_path: Path):
    model = load_model(net).eval().cuda().half()
    x = torch.randn(2, 3, 224, 224, device="cuda", dtype=torch.half)
    fast = convoy.optimize(model, (x,), settings=convoy.Settings(effort="none", db=tmp_path / "perf.db"))
    assert any(step.config.engine == ENGINE.id for step in fast.plan.steps)
    with torch.no_grad():
        exact = model.double()(x.double())
        model.half()
        fast.refresh()
        error = (fast(x).double() - exact).norm() / exact.norm()
        stock = (model(x).double() - exact).norm() / exact.norm()
    assert error < 2 * stock + 1e-3
