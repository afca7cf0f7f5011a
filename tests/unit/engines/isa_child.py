"""Run by test_isa_levels.py in a process whose instruction sets are limited: engines on a few problems. Not a test module.

Prints JSON: the instruction sets in force, how many configs ran, and what is wrong with them.
"""

import json
from dataclasses import replace

import torch

from convoy.engines.compilers import host_compiler, instruction_sets
from convoy.engines.manifest import load_engine
from convoy.measurement.accuracy import judge, make_data, oracle
from convoy.measurement.device.detect import detect_target
from convoy.problem import ConvProblem, Epilogue
from tests.unit.engines.conv_cases import SHAPES, of_dtype

ENGINES = (
    "aten",
    "onednn",
    "gemm",
    "cpu.direct",
    "cpu.direct_bf16",
    "cpu.depthwise",
    "cpu.grouped",
    "cpu.winograd",
    "zeroskip.cpu",
)
NAMES = (
    "3x3 padded",
    "3x3 long reduction",
    "3x3 stride 2",
    "1x1",
    "depthwise",
    "dilation 2 and 3",
    "grouped 5x5",
    "groups of eight",
)
ONE_COLUMN = (
    ConvProblem(1, 2, 2, 7, 1, 4, 7, 3, 3, 1, 2, 1, 2),
    ConvProblem(1, 2, 7, 1, 1, 3, 4, 0, 2, 1, 2),
    ConvProblem(1, 9, 9, 1, 1, 1, 4, 0, 2, 2, 2),
    ConvProblem(2, 16, 6, 3, 24, 3, 3, 1, 1, 1, 3),
    ConvProblem(1, 8, 5, 1, 8, 1, 3, 0, 1),
)
"""Padded, with one output column: where oneDNN is wrong in bf16 with AMX."""


def problems():
    plain = [SHAPES[name] for name in NAMES]
    for problem in (*plain, *ONE_COLUMN):
        for dtype in ("fp32", "bf16", "fp16"):
            for layout in ("nchw", "nhwc"):
                yield of_dtype(problem, dtype).with_layout(layout)
    relu = Epilogue(bias=True, activation="relu")
    yield from (replace(of_dtype(p, "fp32", "as_torch"), layout="nhwc", epilogue=relu) for p in plain)


def main():
    torch.set_num_threads(1)
    target = detect_target("cpu")
    ran, wrong = {}, []
    for problem in problems():
        data = make_data(problem, 1, "integer")
        exact = oracle(problem, data)
        for name in ENGINES:
            engine = load_engine(name)
            if not engine.supports(problem, target):
                continue
            executable = engine.build(problem, engine.space(problem, target)[0], target)
            verdict = judge(executable, engine.family, problem, data, "integer", exact=exact)
            ran[name] = ran.get(name, 0) + 1
            if not verdict.ok:
                wrong.append(f"{name}: {problem}: {verdict.reason}")
    print(
        json.dumps(
            {
                "onednn": instruction_sets.onednn_in_force(),
                "march": instruction_sets.march(),
                "lanes": host_compiler.lanes(),
                "versions": dict(target.versions),
                "ran": ran,
                "wrong": wrong,
            }
        )
    )


main()
