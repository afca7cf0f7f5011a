"""triton.group_norm: within bounds of float64 in the interpreter, compiled for an absent GPU, pieces that it is not for."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from convoy.engines.group_norm import GroupNorm, group_norms
from convoy.engines.subgraph import parse_subgraph
from convoy.engines.triton.triton_group_norm import ENGINE, MOST_PARTS
from convoy.target import Target
from tests.unit.engines.group_norm_cases import CASES, LEAKY_CASES, piece

pytest.importorskip("triton")
TARGET = Target("cuda", "an H100 that is not there", "sm_90", 132, 80 << 30, 50 << 20)
LIMITS = {"fp32": 1e-5, "fp16": 1e-3}

# One process: the fixture takes some seconds.
pytestmark = pytest.mark.xdist_group("group norm interpreter")


@pytest.fixture(scope="module")
def outcomes():
    """The script's lines, by case."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).parent / "interpreted_group_norm.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = {}
    for line in done.stdout.splitlines():
        said = json.loads(line)
        found.setdefault(said["case"], []).append(said)
    return found


@pytest.mark.parametrize("name", [*CASES, *LEAKY_CASES])
def test_results_are_right(outcomes, name):
    assert len(outcomes[name]) == 2
    for said in outcomes[name]:
        assert said["error"] < LIMITS[{**CASES, **LEAKY_CASES}[name][5]], said


def test_several_parts_were_summed(outcomes):
    assert any("parts=3" in said["knobs"] for said in outcomes["silu"])


def test_a_planted_fault_is_seen(outcomes):
    assert outcomes["planted"][0]["error"] > 1e-3


@pytest.mark.parametrize("name", ["halves", "groups of ten"])
def test_it_compiles_with_wide_loads_and_without_atomics(name):
    problem = piece(name, "bf16")
    assert ENGINE.supports(problem, TARGET)
    executable = ENGINE.build(problem, ENGINE.space(problem, TARGET)[0], TARGET)
    for kernel in (executable.sums, executable.rest):
        code = kernel.compiled.asm["ptx"]
        assert "atom." not in code
        if name == "halves":
            assert any(word in code for word in ("ld.global.v4.b32", "ld.global.v2.b64", "v2.b32", "v4.b32"))


def test_parts_fill_the_device_and_no_more():
    problem = piece("halves")
    assert all(1 <= knobs.integer("parts") <= MOST_PARTS for knobs in ENGINE.space(problem, TARGET))
    wide = replace(problem, text=problem.text.replace("6,6", "128,128"))
    assert max(knobs.integer("parts") for knobs in ENGINE.space(wide, TARGET)) > 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (piece("silu").text.replace("silu", "gelu"), "another subgraph"),
        (piece("silu").text.replace("return %z", "return %y, %z"), "another subgraph"),
        (piece("silu").text.replace("fp32", "fp64"), "needs fp16, bf16 or fp32, got fp64"),
        (piece("silu").text.replace("fp32[2,32", "fp32[0,32"), "needs 1 to"),
    ],
)
def test_other_subgraphs_are_refused(text, says):
    assert says in ENGINE.supports(replace(piece("silu"), text=text), TARGET).reason


def test_it_needs_channels_last():
    assert "needs layout nhwc" in ENGINE.supports(piece("silu", layout="nchw"), TARGET).reason


def test_what_a_subgraph_computes_and_which_nodes_join():
    norm = GroupNorm.of(piece("groups of ten"))
    assert (norm.images, norm.pixels, norm.channels, norm.size, norm.activation) == (1, 20, 80, 10, "silu")
    assert list(group_norms(parse_subgraph(piece("silu").text))) == [("y", "z")]
    assert list(group_norms(parse_subgraph(piece("alone").text))) == []
    leaky = parse_subgraph(piece("leaky").text)
    assert list(group_norms(leaky)) == []
    assert list(ENGINE.fusions(leaky)) == [("y", "z")]
    assert GroupNorm.of(piece("leaky")).slope == 0.2


def test_large_images_have_more_parts_where_registers_hold_them():
    problem = piece("volumes")
    large = replace(problem, text=problem.text.replace("2,16,3,5,4", "1,16,128,128,128"))
    for knobs in ENGINE.space(large, TARGET):
        assert knobs.integer("parts") <= 64 or knobs.integer("parts") * knobs.integer("block_c") <= 8192
    assert max(knobs.integer("parts") for knobs in ENGINE.space(large, TARGET)) > 64
    widest = max(ENGINE.space(large, TARGET), key=lambda knobs: (knobs.integer("parts"), knobs.integer("block_c")))
    ENGINE.build(large, widest, TARGET)
