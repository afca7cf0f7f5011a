"""triton.pool_backward: exact in the interpreter, compiled for an absent GPU, refusals; indices as poolings give them."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from convoy.engines.base import Buffers
from convoy.engines.triton.pooling.pool_backward import ENGINE, windows_of
from convoy.errors import LaunchError
from convoy.measurement.data import make_data
from convoy.target import Target
from tests.unit.engines.pool_backward_cases import AVERAGES, CASES, average_piece, piece

pytest.importorskip("triton")
TARGET = Target("cuda", "an H100 that is not there", "sm_90", 132, 80 << 30, 50 << 20)
HERE = Path(__file__).parent


# One process: the fixture takes up to half a minute.
pytestmark = pytest.mark.xdist_group("pool backward interpreter")


@pytest.fixture(scope="module")
def outcomes():
    """The script's lines, by case."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / "interpreted_pool_backward.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = {}
    for line in done.stdout.splitlines():
        said = json.loads(line)
        found.setdefault(said["case"], []).append(said)
    return found


@pytest.mark.parametrize("name", CASES)
def test_every_place_is_exact(outcomes, name):
    assert len(outcomes[name]) == 2
    for said in outcomes[name]:
        assert said["wrong"] == 0, said


@pytest.mark.parametrize("name", AVERAGES)
def test_averages_are_right(outcomes, name):
    assert len(outcomes[name]) == 2
    for said in outcomes[name]:
        assert said["error"] < 1e-6, said


def test_what_windows_divide_by_is_told_apart():
    """A constant where all windows have as many pixels: a kernel that took one for the others would be wrong."""
    even = {name: windows_of(average_piece(name)).even for name in AVERAGES}
    assert even == {
        "inception's": 9, "without the padding": 0, "densenet's": 4, "last windows stand out": 0,
        "the same, without the padding": 0, "a divisor": 5,
    }  # fmt: skip


@pytest.mark.parametrize("name", ["inception's", "the same, without the padding"])
def test_an_average_compiles_with_wide_loads(name):
    problem = average_piece(name, "bf16")
    assert ENGINE.supports(problem, TARGET)
    code = ENGINE.build(problem, ENGINE.space(problem, TARGET)[0], TARGET).kernel.compiled.asm["ptx"]
    assert "ld.global.v4.b32" in code
    assert "atom." not in code


def test_a_planted_fault_is_seen(outcomes):
    assert outcomes["planted"][0]["wrong"] > 0


@pytest.mark.parametrize(("dtype", "indices"), [("fp32", "i64"), ("fp16", "i16"), ("bf16", "i16"), ("bf16", "i32")])
def test_it_compiles_without_atomics_and_with_wide_loads(dtype, indices):
    problem = piece("3x3 stride 2, padded", dtype, indices)
    assert ENGINE.supports(problem, TARGET)
    executable = ENGINE.build(problem, ENGINE.space(problem, TARGET)[0], TARGET)
    code = executable.kernel.compiled.asm["ptx"]
    assert "atom." not in code
    assert "red.global" not in code
    assert "ld.global.v2.b64" in code or "ld.global.v4.b32" in code or "v2.b64" in code


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda p: replace(p, layout="nchw"), "nhwc"),
        (lambda p: replace(p, text=p.text.replace("(1, 1), False", "(2, 2), False")), "dilation"),
        (lambda p: replace(p, text=p.text.replace("(3, 3), (2, 2)", "(11, 11), (1, 1)")), "windows"),
    ],
)
def test_refusals_name_what_is_wanted(change, words):
    support = ENGINE.supports(change(piece("3x3 stride 2, padded")), TARGET)
    assert not support
    assert words in support.reason


def test_a_device_that_is_too_old_and_another_piece_are_refused():
    assert not ENGINE.supports(piece("2x2"), replace(TARGET, arch="sm_75"))
    text = "graph 1\ninput %a: fp32[1,8,4,4]\n%b: fp32[1,8,4,4] = aten.relu.default(%a)\nreturn %b\n"
    support = ENGINE.supports(replace(piece("2x2"), text=text), TARGET)
    assert "a single pooling gradient" in support.reason


def test_strided_gradients_are_refused_at_launch():
    problem = piece("2x2")
    executable = ENGINE.build(problem, ENGINE.space(problem, TARGET)[0], TARGET)
    dy, x, indices = make_data(problem, 1).args
    with pytest.raises(LaunchError, match="dy"):
        executable.launch(Buffers((dy.contiguous(), x, indices), [torch.empty_like(x)], ()), None)


@pytest.mark.parametrize("name", CASES)
def test_drawn_indices_lie_in_their_windows(name):
    """Poolings of values that grow towards the drawn places give these very indices, wherever windows do not share one."""
    problem = piece(name)
    indices = make_data(problem, 4, "integer").args[2]
    n, c, h, w, window, stride, padding, ceil_mode, _ = CASES[name]
    plane = torch.arange(h * w, dtype=torch.float64).reshape(1, 1, h, w).expand(n, c, h, w)
    _, last = F.max_pool2d(plane, window, stride, padding, 1, ceil_mode, return_indices=True)
    _, first = F.max_pool2d(-plane, window, stride, padding, 1, ceil_mode, return_indices=True)
    assert ((indices // w >= first // w) & (indices // w <= last // w)).all()
    assert ((indices % w >= first % w) & (indices % w <= last % w)).all()
    if max(window) > 1 and indices.numel() > 50:
        assert (indices != first).any()
        assert (indices != last).any()
