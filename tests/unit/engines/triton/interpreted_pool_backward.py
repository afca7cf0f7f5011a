"""Run triton.pool_backward in Triton's interpreter and print one JSON line a case: how many places are wrong. A script of its
own, because the interpreter is chosen by the environment before triton is imported."""

from tests.unit.engines import quick_interpreter  # noqa: F401 - turns the interpreter on, before triton is imported

# isort: split

import json
import sys

import torch

from convoy.engines.base import Buffers
from convoy.engines.triton.pooling.pool_backward import ENGINE
from convoy.measurement.data import make_data
from convoy.measurement.oracle import oracle
from convoy.target import Target
from tests.unit.engines.pool_backward_cases import AVERAGES, CASES, average_piece, piece

TARGET = Target("cuda", "an H100 that is not there", "sm_90", 132, 80 << 30, 50 << 20)


def wrong_places(name, knobs, fault=False, indices="i64"):
    """Places of dx that differ from float64 on integer data, of a result that was full of garbage."""
    problem = piece(name, indices=indices)
    data = make_data(problem, 3, "integer")
    executable = ENGINE.build(problem, knobs, TARGET)
    (wanted,) = oracle(problem, data)
    result = torch.full_like(data.args[1], 77)
    if fault:
        data.args[2].add_(1)
    executable.launch(Buffers(data.args, [result], ()), None)
    return int((result.double() != wanted).sum()), result.numel()


for name in CASES:
    space = ENGINE.space(piece(name), TARGET)
    for knobs, indices in ((space[0], "i64"), (space[-1], "i16")):
        wrong, of = wrong_places(name, knobs, indices=indices)
        print(json.dumps({"case": name, "knobs": str(knobs), "wrong": wrong, "of": of}))
wrong, of = wrong_places("2x2", ENGINE.space(piece("2x2"), TARGET)[0], fault=True)
print(json.dumps({"case": "planted", "knobs": "", "wrong": wrong, "of": of}))
for name in AVERAGES:
    problem = average_piece(name)
    data = make_data(problem, 3, "normal")
    (wanted,) = oracle(problem, data)
    space = ENGINE.space(problem, TARGET)
    for knobs in (space[0], space[-1]):
        result = torch.full_like(data.args[1], 77)
        ENGINE.build(problem, knobs, TARGET).launch(Buffers(data.args, [result], ()), None)
        error = float((result.double() - wanted).norm() / wanted.norm())
        print(json.dumps({"case": name, "knobs": str(knobs), "error": error}))
sys.stdout.flush()
