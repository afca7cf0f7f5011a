"""Run triton.group_norm in Triton's interpreter and print one JSON line a case: its error beside float64. A script of its own,
because the interpreter is chosen by the environment before triton is imported."""

from tests.unit.engines import quick_interpreter  # noqa: F401 - turns the interpreter on, before triton is imported

# isort: split

import json
import sys

import torch

from convoy.engines.base import Buffers
from convoy.engines.triton.triton_group_norm import ENGINE
from convoy.measurement.data import make_data
from convoy.measurement.oracle import oracle
from convoy.target import Target
from tests.unit.engines.group_norm_cases import CASES, LEAKY_CASES, piece

TARGET = Target("cuda", "an H100 that is not there", "sm_90", 5, 80 << 30, 50 << 20)


def worst_error(problem, knobs, fault=False):
    """The relative error of the result, written over garbage, of data with a mean far from zero."""
    data = make_data(problem, 3, "normal")
    data.args[0].add_(30.0 if data.args[0].dtype == torch.float32 else 2.0)
    (exact,) = oracle(problem, data)
    executable = ENGINE.build(problem, knobs, TARGET)
    assert executable.workspace_bytes == ENGINE.workspace_bytes(problem, knobs)
    y = torch.full_like(data.args[0], 77)
    workspace = torch.full((executable.workspace_bytes,), 255, dtype=torch.uint8)
    packed = executable.pack(data.constants)
    if fault:
        data.args[0][0, 0, 0, 0] += 50
    executable.launch(Buffers(data.args, [y], packed), workspace)
    return float((y.double() - exact).norm() / exact.norm())


for name in (*CASES, *LEAKY_CASES):
    problem = piece(name)
    space = ENGINE.space(problem, TARGET)
    for knobs in (space[0], space[-1]):
        print(json.dumps({"case": name, "knobs": str(knobs), "error": worst_error(problem, knobs)}))
problem = piece("silu")
print(json.dumps({"case": "planted", "error": worst_error(problem, ENGINE.space(problem, TARGET)[0], fault=True)}))
sys.stdout.flush()
