"""triton.group_norm on the GPU: every setting within bounds, and in a captured graph the same bits every time."""

from __future__ import annotations

import pytest

from convoy.engines.triton.triton_group_norm import ENGINE
from convoy.measurement.device.detect import detect_target
from convoy.target import Target
from tests.gpu.engines.subgraph_checks import assert_every_setting_is_right, assert_replays_give_the_same_bits
from tests.unit.engines import group_norm_cases
from tests.unit.engines.group_norm_cases import piece

pytestmark = pytest.mark.gpu

SHAPES = {
    **group_norm_cases.CASES,
    **group_norm_cases.LEAKY_CASES,
    "instances of a volume": (1, 32, 32, (64, 64), 64, "fp16", "leaky_relu", True),
    "diffusion, first level": (2, 320, 32, 64, 64, "fp16", "silu", True),
    "diffusion, last level": (2, 1280, 32, 8, 8, "fp16", "silu", True),
    "decoder": (1, 128, 32, 256, 256, "bf16", "silu", True),
    "batch of 32": (32, 64, 8, 56, 56, "fp16", "relu", True),
    "one long group": (4, 256, 1, 14, 14, "fp32", "", True),
}


@pytest.fixture(scope="module")
def target() -> Target:
    return detect_target("cuda")


@pytest.fixture(autouse=True)
def shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_norm_cases, "CASES", SHAPES)


@pytest.mark.parametrize("name", SHAPES)
def test_every_setting_is_right(name: str, target: Target):
    assert_every_setting_is_right(ENGINE, piece(name), target)


@pytest.mark.parametrize("name", ["diffusion, first level", "groups of ten", "decoder"])
def test_replays_of_a_graph_give_the_same_bits(name: str, target: Target):
    assert_replays_give_the_same_bits(ENGINE, piece(name), target)
