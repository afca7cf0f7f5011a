"""The kernels' arithmetic on a CPU, in Triton's interpreter: exact on integers."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

SCRIPT = Path(__file__).with_name("interpreted.py")


def tables():
    """The script's tables, read from its text: importing it would turn the interpreter on in this process."""
    tree = ast.parse(SCRIPT.read_text())
    return {
        t.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for t in node.targets
        if isinstance(t, ast.Name)
    }


def case_names():
    names = [ast.literal_eval(key) for key in tables()["CASES"].keys]
    return names + [f"activation {ast.literal_eval(key)}" for key in tables()["ACTIVATIONS"].keys]


# One process: the fixture takes up to half a minute.
pytestmark = pytest.mark.xdist_group("interpreter")


@pytest.fixture(scope="module")
def outcomes():
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return {row["case"]: row for row in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("name", case_names())
def test_agrees_with_float64(outcomes, name):
    row = outcomes[name]
    assert "refused" not in row, row
    activation = name.removeprefix("activation ")
    # fp16 rounds what these activations make of an integer: half a unit in the last place at 8, and exp's own error.
    bound = 5e-3 if activation in ("silu", "hardswish", "hardsigmoid", "sigmoid", "gelu") else 0.0
    assert row["error"] <= bound, row


@pytest.mark.parametrize("name", ast.literal_eval(tables()["SLICED"]))
def test_a_slice_of_a_larger_tensor_is_written_and_nothing_beside_it(outcomes, name):
    row = outcomes[f"slice {name}"]
    assert row["error"] == 0
    assert row["outside"] == 0


def test_gathered_values_are_rounded_to_tf32_and_not_cut(outcomes):
    """The tensor core cuts, and sums that all come out small add up layer by layer."""
    assert outcomes["gathered values, as_torch"]["error"] == 0
    assert outcomes["gathered values, as_torch"]["from_x"] > 1e-4
    assert outcomes["gathered values, strict"]["from_x"] == 0


@pytest.mark.parametrize("name", ["merged", "merged first guess", "merged fresh"])
def test_parallel_convolutions_in_one_launch(outcomes, name):
    assert outcomes[name]["error"] == 0
    assert outcomes[name]["outside"] == 0


@pytest.mark.parametrize("name", [ast.literal_eval(key) for key in tables()["STEMS"].keys])
def test_gradients_of_first_layers(outcomes, name):
    assert outcomes[name]["error"] == 0


def test_split_cases_do_split(outcomes):
    assert outcomes["stem gradient"]["splits"] == 2
    assert outcomes["stem gradient, one share"]["splits"] == 1
    assert outcomes["swapped split"]["splits"] == 3
    assert outcomes["gather split"]["splits"] == 3
    assert outcomes["swapped images"]["splits"] == 2
    assert outcomes["wgrad"]["splits"] == 3


def test_a_planted_fault_is_seen(outcomes):
    assert outcomes["a planted fault"]["error"] > 0.0
