"""triton.batch_norm: within bounds of float64 in the interpreter, compiled for an absent GPU, pieces that it is not for."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from convoy.engines.triton.batch_norm import ENGINE, MOST_PARTS, parts_of
from convoy.engines.triton.batch_norm_graph import norm_of
from convoy.target import Target
from tests.unit.engines.norm_cases import CASES, backward, forward

pytest.importorskip("triton")
TARGET = Target("cuda", "an H100 that is not there", "sm_90", 132, 80 << 30, 50 << 20)
HERE = Path(__file__).parent
LIMITS = {"fp32": 1e-5, "fp16": 1e-3}
"""fp32 with a mean a hundred times the deviation: the values themselves are rounded to 1e-7 of the mean."""


# One process: the fixture takes up to half a minute.
pytestmark = pytest.mark.xdist_group("batch norm interpreter")


@pytest.fixture(scope="module")
def outcomes():
    """The script's lines, by case."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / "interpreted_batch_norm.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = {}
    for line in done.stdout.splitlines():
        said = json.loads(line)
        found.setdefault(said["case"], []).append(said)
    return found


@pytest.mark.parametrize("name", CASES)
def test_statistics_images_and_gradients_are_right(outcomes, name):
    assert len(outcomes[name]) == 8
    for said in outcomes[name]:
        assert said["error"] < LIMITS[CASES[name][4]], said


def test_a_planted_fault_is_seen(outcomes):
    assert outcomes["planted"][0]["error"] > 1e-3


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("make", [forward, backward])
def test_it_compiles_with_wide_loads_and_without_atomics(make, dtype):
    problem = make("relu", dtype)
    assert ENGINE.supports(problem, TARGET)
    executable = ENGINE.build(problem, ENGINE.space(problem, TARGET)[0], TARGET)
    for kernel in (executable.sums, executable.rest):
        code = kernel.compiled.asm["ptx"]
        assert "atom." not in code
        assert "ld.global.v4.b32" in code or "ld.global.v2.b64" in code or "v4.b32" in code


def test_the_largest_pipeline_fits_into_shared_memory():
    problem = backward(
        "residual and relu", "fp32"
    )  # four images are read: 8192 values in three stages would be 256 KiB

    def under_way(knobs):
        return (knobs.integer("stages") - 1) * knobs.integer("block_r") * knobs.integer("block_c")

    largest = max(ENGINE.space(problem, TARGET), key=under_way)
    assert under_way(largest) == 2 * 4096
    executable = ENGINE.build(problem, largest, TARGET)
    assert executable.rest.shared_bytes > 2 * 4096 * 4


def test_parts_fill_the_device_and_no_more():
    norm = norm_of(forward("relu"))
    for rows in (2, 1000, 10**6):
        for block_r, block_c, wanted in ((64, 32, 132), (128, 32, 264), (16, 128, 528)):
            parts = parts_of(replace(norm, rows=rows), block_r, block_c, wanted)
            assert 1 <= parts <= MOST_PARTS
            assert (parts - 1) * block_r < rows
    for make in (forward, backward):
        for knobs in ENGINE.space(make("many channels"), TARGET):
            built = ENGINE.build(make("many channels"), knobs, TARGET)
            assert built.workspace_bytes == ENGINE.workspace_bytes(make("many channels"), knobs)
            break


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda p: replace(p, layout="nchw"), "nhwc"),
        (lambda p: replace(p, text=p.text.replace("True, 0.1", "False, 0.1")), "another subgraph"),
        (lambda p: replace(p, text=p.text.replace("return ", "return %y, ")), "another subgraph"),
        (
            lambda p: replace(
                p, text=p.text.replace("(%x, %p0, %p1", "(%x, %p1, %p1").replace("input %p0: fp32[64]\n", "")
            ),
            "another",
        ),
        (lambda p: replace(p, text=p.text.replace("[3,64,6,5]", "[1,64,1,1]")), "two values"),
    ],
    ids=["layout", "no batch statistics", "the norm itself is read", "one value in two roles", "one value"],
)
def test_refusals_name_what_is_wanted(change, words):
    support = ENGINE.supports(change(forward("relu")), TARGET)
    assert not support
    assert words in support.reason


def test_a_gradient_in_part_and_a_device_that_is_too_old_are_refused():
    part = replace(backward("relu"), text=backward("relu").text.replace("(True, True, True)", "(True, False, True)"))
    assert "another subgraph" in ENGINE.supports(part, TARGET).reason
    odd = backward("part")
    assert ENGINE.supports(odd, TARGET)
    odd = replace(odd, text=odd.text.replace("1, 16, 56)", "1, 17, 57)"))
    assert "multiple of 16 bytes" in ENGINE.supports(odd, TARGET).reason
    assert not ENGINE.supports(forward("relu"), replace(TARGET, arch="sm_75"))


def test_what_32_bits_cannot_index_is_refused():
    """A norm's part may be small where the whole that it lies in is not."""
    part = backward("part")
    huge = part.text.replace("fp32[2,64,4,5]", "fp32[2,67108864,4,5]")
    assert huge != part.text
    assert "2^31" in ENGINE.supports(replace(part, text=huge), TARGET).reason
    problem = forward("relu")
    executable = ENGINE.build(problem, ENGINE.space(problem, TARGET)[0], TARGET)
    y = executable.norm.results.index("y")
    assert executable.accept_slice(y, 128, 64)
    assert not executable.accept_slice(y, 1 << 26, 64)
    assert not executable.accept_slice(y, 128 + 8, 4)


def test_volumes_need_channels_last_3d():
    problem = forward("volumes")
    assert problem.layout == "ndhwc"
    assert ENGINE.supports(problem, TARGET)
    assert "needs layout ndhwc, got ncdhw" in ENGINE.supports(problem.with_layout("ncdhw"), TARGET).reason
    executable = ENGINE.build(problem, ENGINE.space(problem, TARGET)[0], TARGET)
    assert not executable.accept_slice(len(executable.norm.results) - 1, 64, 16)
