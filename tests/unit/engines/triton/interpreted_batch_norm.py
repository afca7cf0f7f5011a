"""Run triton.batch_norm in Triton's interpreter and print one JSON line a case: its error beside float64. A script of its own,
because the interpreter is chosen by the environment before triton is imported."""

from tests.unit.engines import quick_interpreter  # noqa: F401 - turns the interpreter on, before triton is imported

# isort: split

import json
import sys

import torch

from convoy.engines.base import Buffers
from convoy.engines.subgraph import parse_subgraph, torch_format
from convoy.engines.torch_operators import DTYPES
from convoy.engines.triton.batch_norm import ENGINE
from convoy.engines.triton.batch_norm_graph import norm_of
from convoy.measurement.data import make_data
from convoy.measurement.oracle import oracle
from convoy.target import Target
from tests.unit.engines.norm_cases import CASES, backward, forward

TARGET = Target("cuda", "an H100 that is not there", "sm_90", 5, 80 << 30, 50 << 20)


def data_of(problem):
    """Random data with a mean far from zero, a variance that is one, and statistics that are those of the batch."""
    data = make_data(problem, 3, "normal")
    norm = norm_of(problem)
    named = dict(zip(norm.args, data.args, strict=True))
    x = named["x"].add_(100.0 if x_is_wide(named["x"]) else 2.0)
    if norm.forward:
        named["var"].abs_()
        return data
    across = (0, *range(2, x.dim()))
    named["mean"].copy_(x.double().mean(across))
    named["rstd"].copy_((x.double().var(across, unbiased=False) + norm.eps).rsqrt())
    if "y" in named:
        named["y"].relu_()
    return data


def x_is_wide(x):
    return x.dtype == torch.float32


def worst_error(problem, knobs, fault=False):
    """The largest relative error of a result, of results and a workspace that were full of garbage."""
    data = data_of(problem)
    wanted = oracle(problem, data)
    executable = ENGINE.build(problem, knobs, TARGET)
    graph = parse_subgraph(problem.text)
    made = [
        torch.full(graph.values[name].spec.shape, 77, dtype=DTYPES[graph.values[name].spec.dtype])
        for name in graph.outputs
    ]
    made = [t.to(memory_format=torch_format(problem.layout, t.dim())) for t in made]
    workspace = torch.full((executable.workspace_bytes,), 255, dtype=torch.uint8)
    if fault:
        data.args[0][0, 0, 0, 0] += 50
    executable.launch(Buffers(data.args, made, ()), workspace)
    return max(
        float((found.double() - exact).norm() / exact.norm().clamp(min=1e-30))
        for found, exact in zip(made, wanted, strict=True)
    )


for name in CASES:
    for label, problem in (
        ("forward", forward(name)),
        ("unread", forward(name, unread=True)),
        ("backward", backward(name)),
        ("masked", backward(name, masked=True)),
    ):
        space = ENGINE.space(problem, TARGET)
        for knobs in (space[0], space[-1]):
            print(json.dumps({"case": name, "piece": label, "knobs": str(knobs), "error": worst_error(problem, knobs)}))
problem = forward("relu")
print(json.dumps({"case": "planted", "error": worst_error(problem, ENGINE.space(problem, TARGET)[0], fault=True)}))
sys.stdout.flush()
