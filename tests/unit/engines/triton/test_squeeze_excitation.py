"""triton.squeeze_excitation: within bounds of float64 in the interpreter, compiled for an absent GPU, other pieces refused."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from convoy.engines.subgraph import parse_subgraph
from convoy.engines.triton.gates.squeeze_excitation import ENGINE, MOST_PARTS, columns_of
from convoy.engines.triton.gates.squeeze_excitation_pattern import SqueezeExcitation, squeeze_excitations
from convoy.pipeline.net import capture_net
from convoy.settings import Settings, checked_settings
from convoy.target import Target
from tests.unit.engines.squeeze_excitation_cases import CASES, block

pytest.importorskip("triton")
TARGET = Target("cuda", "an H100 that is not there", "sm_90", 132, 80 << 30, 50 << 20)
LIMITS = {"fp32": 1e-5, "fp16": 1e-3}

# One process: the fixture takes some seconds.
pytestmark = pytest.mark.xdist_group("squeeze-and-excitation interpreter")


@pytest.fixture(scope="module")
def outcomes():
    """The script's lines, by case."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).parent / "interpreted_squeeze_excitation.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = {}
    for line in done.stdout.splitlines():
        said = json.loads(line)
        found.setdefault(said["case"], []).append(said)
    return found


@pytest.mark.parametrize("name", CASES)
def test_results_are_right(outcomes, name):
    assert len(outcomes[name]) == 2
    for said in outcomes[name]:
        assert said["error"] < LIMITS[CASES[name][5]], said


def test_several_parts_were_added(outcomes):
    assert any("rows=1" not in said["knobs"] for said in outcomes["large"])
    problem = block("many hidden")
    assert columns_of(SqueezeExcitation.of(problem), ENGINE.space(problem, TARGET)[0]) > 1


@pytest.mark.parametrize("fault", ["image", "weight"])
def test_a_planted_fault_is_seen(outcomes, fault):
    assert outcomes[f"planted {fault}"][0]["error"] > 1e-3


@pytest.mark.parametrize("name", ["residual and relu", "many hidden"])
def test_it_compiles_without_atomics_and_waits_for_the_kernel_before(name):
    problem = block(name, "bf16")
    assert ENGINE.supports(problem, TARGET)
    executable = ENGINE.build(problem, ENGINE.space(problem, TARGET)[0], TARGET)
    for kernel in (executable.squeeze, executable.excite):
        code = kernel.compiled.asm["ptx"]
        assert "atom." not in code
        assert "griddepcontrol.wait" in code
        assert code.index("ld.global") < code.index("griddepcontrol.wait")  # weights come first


def test_settings_fill_the_device_and_hold_what_registers_hold():
    for name, sizes in (("large", "1,16,112,112"), ("many hidden", "2,2304,7,7")):
        n, c, _, h, w = CASES[name][:5]
        problem = replace(block(name), text=block(name).text.replace(f"{n},{c},{h},{w}", sizes))
        found = SqueezeExcitation.of(problem)
        for knobs in ENGINE.space(problem, TARGET) if found else ():
            assert 1 <= knobs.integer("rows") * columns_of(found, knobs) <= MOST_PARTS
    problem = replace(block("large"), text=block("large").text.replace("1,16,40,41", "1,16,112,112"))
    assert max(knobs.integer("rows") for knobs in ENGINE.space(problem, TARGET)) > 1


BASE = block("residual and relu").text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (BASE.replace("aten.sigmoid", "aten.tanh"), "another subgraph"),
        (BASE.replace("return %z", "return %g, %z"), "another subgraph"),
        (BASE.replace("add.Tensor(%y, %r)", "add.Tensor(%y, %x)"), "another subgraph"),
        (BASE.replace("mul.Tensor(%x, %g)", "mul.Tensor(%r, %g)"), "another subgraph"),
        (BASE.replace("constant %b1: fp16[32]", "input %b1: fp16[32]"), "another subgraph"),
        (BASE.replace("fp16", "fp64"), "needs fp16, bf16 or fp32, got fp64"),
        (BASE.replace("fp16[3,", "fp16[0,"), "needs 1 to"),
    ],
    ids=["tanh", "gate returned", "x twice", "no x", "bias of a call", "fp64", "no images"],
)
def test_other_subgraphs_are_refused(text, says):
    assert says in ENGINE.supports(replace(block("residual and relu"), text=text), TARGET).reason


def test_it_needs_channels_last_and_a_gpu():
    assert "needs layout nhwc" in ENGINE.supports(block("relu", layout="nchw"), TARGET).reason
    cpu = Target("cpu", "a CPU", "avx2", 2, 8 << 30, 1 << 20)
    assert "needs a CUDA device" in ENGINE.supports(block("relu"), cpu).reason


def test_what_a_subgraph_computes_and_which_nodes_join():
    found = SqueezeExcitation.of(block("residual and relu"))
    assert (found.images, found.pixels, found.channels, found.hidden) == (3, 15, 32, 8)
    assert (found.inner, found.outer, found.residual, found.relu) == ("relu", "sigmoid", True, True)
    groups = list(squeeze_excitations(parse_subgraph(BASE)))
    assert groups == [("m", "s", "a", "e", "g", "y"), ("m", "s", "a", "e", "g", "y", "t", "z")]


class Gated(nn.Module):
    """A block as torchvision and timm write it, and one whose mean another layer reads."""

    def __init__(self, shared: bool = False) -> None:
        super().__init__()
        self.conv, self.first, self.second = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 4, 1), nn.Conv2d(4, 16, 1)
        self.shared = shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x)
        mean = x.mean((2, 3), keepdim=True)
        y = x * torch.sigmoid(self.second(torch.relu(self.first(mean))))
        return y + mean if self.shared else torch.relu(y + x.flip(0))


@pytest.mark.parametrize("shared", [False, True])
def test_blocks_of_a_module_become_regions_unless_others_read_what_is_in_them(shared, tmp_path):
    settings = checked_settings(Settings(effort="none", db=tmp_path / "perf.db"))
    net = capture_net("gated", Gated(shared).eval(), (torch.randn(2, 3, 9, 9),), {}, settings, TARGET)
    groups = [set(group) for group in squeeze_excitations(net.captured.graph)]
    regions = [set(region.nodes) for region in net.regions.values()] if isinstance(net.regions, dict) else [
        set(region.nodes) for region in net.regions
    ]  # fmt: skip
    assert len(groups) == (0 if shared else 2)
    assert all(group in regions for group in groups)
