"""triton.group_norm on the GPU: every setting within bounds, and in a captured graph the same bits every time."""

from __future__ import annotations

import pytest
import torch

from convoy.engines.base import Buffers
from convoy.engines.triton.triton_group_norm import ENGINE
from convoy.measurement.accuracy import judge, make_data
from convoy.measurement.device.detect import detect_target
from convoy.target import Target
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
    problem = piece(name)
    assert ENGINE.supports(problem, target), ENGINE.supports(problem, target).reason
    for knobs in ENGINE.space(problem, target):
        executable = ENGINE.build(problem, knobs, target)
        data = make_data(problem, 5, "normal", "cuda")
        verdict = judge(executable, ENGINE.family, problem, data, "normal")
        assert verdict.ok, f"[{knobs}]: {verdict.reason}"


@pytest.mark.parametrize("name", ["diffusion, first level", "groups of ten", "decoder"])
def test_replays_of_a_graph_give_the_same_bits(name: str, target: Target):
    problem = piece(name)
    executable = ENGINE.build(problem, ENGINE.space(problem, target)[0], target)
    data = make_data(problem, 6, "normal", "cuda")
    packed = executable.pack(data.constants)
    y = torch.empty_like(data.args[0])
    workspace = torch.empty(executable.workspace_bytes, dtype=torch.uint8, device="cuda")
    executable.launch(Buffers(data.args, [y], packed), workspace)
    torch.cuda.synchronize()
    eager = y.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        executable.launch(Buffers(data.args, [y], packed), workspace)
    for _ in range(20):
        y.fill_(torch.nan)
        workspace.fill_(255)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, eager)
