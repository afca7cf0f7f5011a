"""triton.conv3d: exact on integers in the interpreter, compiled for an absent GPU, and the problems that it refuses."""

import ast
import itertools
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from convoy.engines.triton.triton_build import assembler_log
from convoy.engines.triton.volumes.conv3d_tile import VolumeTile
from convoy.engines.triton.volumes.triton_conv3d import ENGINE, boxes_support
from convoy.problem import Conv3dProblem, ConvProblem, Epilogue
from convoy.target import Target
from tests.unit.engines.spills import assert_no_spills

pytest.importorskip("triton")
TARGET = Target("cuda", "an H100 that is not there", "sm_90", 132, 80 << 30, 50 << 20)
AMPERE = replace(TARGET, arch="sm_80", name="an A100 that is not there")
SCRIPT = Path(__file__).parent / "interpreted_conv3d.py"
BASE = Conv3dProblem(1, 32, (16, 32, 32), 32, (3, 3, 3), (1, 1, 1), layout="ndhwc", dtype="fp16")
FULL = Epilogue(bias=True, residual=True, activation="relu")
DRAWN = [f"drawn {number}" for number in range(12)]

# One process: the fixture takes some seconds.
pytestmark = pytest.mark.xdist_group("conv3d interpreter")


def case_names():
    """The script's cases, read from its text: importing it would turn the interpreter on in this process."""
    tables = [node for node in ast.parse(SCRIPT.read_text()).body if isinstance(node, ast.Assign)]
    (cases,) = [node.value for node in tables if getattr(node.targets[0], "id", "") == "CASES"]
    return [ast.literal_eval(key) for key in cases.keys]


@pytest.fixture(scope="module")
def outcomes():
    """The script's lines, by case."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return {row["case"]: row for row in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("name", [*case_names(), *DRAWN])
def test_agrees_with_float64(outcomes, name):
    assert outcomes[name]["error"] == 0.0, outcomes[name]


def test_cases_run_the_kernel_that_they_name(outcomes):
    assert not outcomes["first guess"]["gather"]
    assert outcomes["gather strict"]["gather"]
    assert outcomes["boxes split"]["splits"] == 3
    assert outcomes["gather split"]["splits"] == 4
    assert {row["gather"] for name, row in outcomes.items() if name in DRAWN} == {False, True}


def test_a_planted_fault_is_seen(outcomes):
    assert outcomes["a planted fault"]["error"] > 0.0


def tile(**changes):
    """A tile of boxes that share slices."""
    base = {"gather": False, "flat": False, "depth": 4, "block_d": 1, "block_h": 8, "block_w": 16}
    return VolumeTile(**(base | {"block_k": 32, "block_c": 32, "stages": 2} | changes))


@pytest.mark.parametrize(
    ("problem", "made"),
    [
        (replace(BASE, epilogue=FULL), tile()),
        (replace(BASE, k=128, c=64, dtype="bf16"), tile(depth=1, block_d=2, block_h=8, block_w=8, block_k=128)),
        (replace(BASE, k=64, stride=(2, 2, 2)), tile(depth=1, block_k=64)),
        (replace(BASE, dtype="fp32"), tile(depth=2, block_c=16)),
        (replace(BASE, c=1), tile(gather=True, flat=True, depth=1, block_h=1, block_w=128)),
    ],
)
def test_tiles_compile_to_wgmma_without_spills(problem, made):
    kernel = ENGINE.build(problem, made.knobs, TARGET).kernel.compiled
    code = kernel.asm["ptx"]
    assert "wgmma.mma_async" in code
    assert ".target sm_90a" in code
    assert ("cp.async.bulk.tensor" in code) != made.gather
    log = assembler_log(kernel)
    assert "C7515" not in log
    assert_no_spills(log)


def test_shared_slices_are_loaded_once():
    """Four neighbouring slices of y read six of x: six copies by TMA in the loop, and as many before it."""
    ptx = ENGINE.build(BASE, tile().knobs, TARGET).kernel.compiled.asm["ptx"]
    assert ptx.count("cp.async.bulk.tensor.5d.shared::cluster.global") == 2 * 6


def test_the_default_setting_builds_on_ampere():
    assert ENGINE.supports(BASE, AMPERE)
    space = ENGINE.space(BASE, AMPERE)
    assert all(knobs["gather"] for knobs in space)
    assert ".target sm_80" in ENGINE.build(BASE, space[0], AMPERE).kernel.compiled.asm["ptx"]


def test_settings_are_distinct_and_by_rising_estimate():
    for problem in (BASE, replace(BASE, k=320, c=320, size=(4, 4, 4)), replace(BASE, c=1), replace(BASE, n=0)):
        space = ENGINE.space(problem, TARGET)
        assert 0 < len(space) == len(set(space)) <= 20
        guesses = [ENGINE.estimate_us(problem, knobs, TARGET) for knobs in space]
        assert guesses == sorted(guesses)
    assert {knobs["depth"] for knobs in ENGINE.space(BASE, TARGET)} == {1, 2, 4}


MEASURED = {
    (32, 128): {
        (4, 1, 8, 16, 32, 32, 2, 4, 1): 438.2,
        (4, 1, 16, 16, 32, 32, 2, 8, 1): 512.1,
        (1, 4, 8, 8, 32, 32, 4, 4, 1): 546.0,
        (2, 1, 16, 16, 32, 32, 3, 8, 1): 613.9,
        (4, 1, 8, 16, 32, 32, 4, 4, 1): 831.2,
    },
    (64, 64): {
        (2, 1, 8, 16, 64, 64, 2, 8, 1): 116.7,
        (4, 1, 8, 8, 64, 32, 3, 4, 1): 155.2,
        (2, 1, 16, 16, 64, 32, 2, 8, 1): 173.5,
        (4, 1, 8, 16, 64, 32, 3, 8, 1): 177.6,
        (4, 1, 8, 16, 64, 16, 6, 8, 1): 262.2,
    },
    (256, 16): {
        (1, 4, 4, 8, 128, 64, 6, 4, 2): 25.3,
        (2, 1, 8, 16, 128, 64, 2, 8, 4): 43.3,
        (4, 1, 8, 16, 64, 32, 3, 8, 4): 50.8,
        (4, 1, 8, 8, 64, 64, 3, 4, 4): 67.6,
        (1, 4, 4, 8, 128, 16, 6, 4, 6): 68.9,
    },
}
"""Microseconds on an H100 80GB, 2026-11-26, by (channels, side of the volume) and by a tile's depth, block_d, block_h, block_w,
block_k, block_c, stages, warps and split."""


@pytest.mark.parametrize(("channels", "side"), MEASURED)
def test_estimates_put_measured_tiles_in_order(channels, side):
    """The fastest tile comes first and its estimate is near; no tile comes before one that takes two thirds of its time."""
    problem = replace(BASE, k=channels, c=channels, size=(side,) * 3)
    rows = MEASURED[channels, side]
    guesses = {sizes: ENGINE.estimate_us(problem, VolumeTile(False, False, *sizes).knobs, TARGET) for sizes in rows}
    fastest = min(rows, key=rows.__getitem__)
    assert min(guesses, key=guesses.__getitem__) == fastest
    assert guesses[fastest] == pytest.approx(rows[fastest], rel=0.25)
    for one, other in itertools.permutations(rows, 2):
        assert guesses[one] < guesses[other] or rows[one] > rows[other] / 1.5


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (replace(BASE, groups=2), "needs groups = 1, got 2"),
        (replace(BASE, layout="ncdhw"), "needs layout ndhwc, got ncdhw"),
        (replace(BASE, direction="dgrad"), "direction fprop only, got dgrad"),
        (replace(BASE, dtype="fp64"), "needs fp16, bf16 or fp32, got fp64"),
        (replace(BASE, n=1 << 15, size=(16, 64, 64)), "fewer than 2^31 elements"),
        (ConvProblem(1, 8, 8, 8, 8, 3, 3, layout="nhwc"), "three-dimensional convolutions only"),
    ],
)
def test_refusals_say_why(problem, reason):
    assert reason in ENGINE.supports(problem, TARGET).reason


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (replace(BASE, c=12), "multiples of 8"),
        (replace(BASE, stride=(1, 2, 2), size=(8, 15, 16)), "multiples of a stride"),
        (replace(BASE, dtype="fp32", numerics="strict"), "tensor cores"),
    ],
)
def test_what_tma_cannot_read_is_gathered(problem, reason):
    assert reason in boxes_support(problem, TARGET).reason
    assert all(knobs["gather"] for knobs in ENGINE.space(problem, TARGET))
