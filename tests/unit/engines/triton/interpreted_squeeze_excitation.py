"""Run triton.squeeze_excitation in Triton's interpreter and print one JSON line a case: its error beside float64. A script of its
own, because the interpreter is chosen by the environment before triton is imported."""

from tests.unit.engines import quick_interpreter  # noqa: F401 - turns the interpreter on, before triton is imported

# isort: split

import json
import sys

import torch

from convoy.engines.base import Buffers
from convoy.engines.triton.gates.squeeze_excitation import ENGINE
from convoy.measurement.data import make_data
from convoy.measurement.oracle import oracle
from convoy.target import Target
from tests.unit.engines.squeeze_excitation_cases import CASES, block

TARGET = Target("cuda", "an H100 that is not there", "sm_90", 5, 80 << 30, 50 << 20)


def worst_error(problem, knobs, fault=""):
    """The relative error of the result, written over garbage, of data with a mean that matters."""
    data = make_data(problem, 3, "normal")
    data.args[0].add_(1.0)
    (exact,) = oracle(problem, data)
    executable = ENGINE.build(problem, knobs, TARGET)
    assert executable.workspace_bytes == ENGINE.workspace_bytes(problem, knobs)
    y = torch.full_like(data.args[0], 77)
    workspace = torch.full((executable.workspace_bytes,), 255, dtype=torch.uint8)
    packed = list(executable.pack(data.constants))
    if fault == "image":
        data.args[0][0, 0, -1, -1] += 50
    if fault == "weight":
        packed[0][0, 0] += 5
    executable.launch(Buffers(data.args, [y], tuple(packed)), workspace)
    return float((y.double() - exact).norm() / exact.norm())


for name in CASES:
    for mean in ("mean", "adaptive"):
        problem = block(name, mean=mean)
        space = ENGINE.space(problem, TARGET)
        knobs = space[0] if mean == "mean" else space[-1]
        print(json.dumps({"case": name, "knobs": str(knobs), "error": worst_error(problem, knobs)}))
problem = block("efficientnet")
for fault in ("image", "weight"):
    error = worst_error(problem, ENGINE.space(problem, TARGET)[0], fault)
    print(json.dumps({"case": f"planted {fault}", "error": error}))
sys.stdout.flush()
