"""Layers to be measured, their tensors on the device, and what a right result is: what `layers.py` and `kernels.py` share."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from bench.layers.make_layers import COLUMNS as SIZES
from bench.layers.make_layers import VOLUME_COLUMNS
from torch.nn import functional

from convoy.engines.base import Buffers, Executable
from convoy.engines.support_checks import torch_sizes
from convoy.problem import Conv3dProblem, ConvProblem, LinearProblem

FOLDER = Path(__file__).parent
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
DIRECTIONS = ("fprop", "dgrad", "wgrad")
Layer = ConvProblem | Conv3dProblem | LinearProblem

RUN_HELP = """A RUN is DTYPE:NUMERICS:BATCH:NET,NET,...[:DIRECTION,...] with nets of bench/layers (`targets` is one) or linear
layers as CxK, and directions fprop (where none is named), dgrad and wgrad: fp16:half:32:resnet50,vgg19 or
bf16:half:128:googlenet:dgrad,wgrad or fp32:strict:1:4096x1000."""


def problems(run: str) -> list[Layer]:
    """A run's layers, each once, direction by direction.

    Raises:
        ValueError: a run that is none, naming it.
    """
    parts = run.split(":")
    if len(parts) not in (4, 5):
        raise ValueError(f"run {run!r}: expected DTYPE:NUMERICS:BATCH:NETS or DTYPE:NUMERICS:BATCH:NETS:DIRECTIONS")
    dtype, numerics, batch, names = parts[:4]
    directions = parts[4].split(",") if len(parts) == 5 else ["fprop"]
    if unknown := [d for d in directions if d not in DIRECTIONS]:
        raise ValueError(f"run {run!r}: direction {unknown[0]!r} is none of {', '.join(DIRECTIONS)}")
    found: dict[Layer, None] = {}
    for direction in directions:
        for name in names.split(","):
            if name.replace("x", "").isdigit():
                c, k = map(int, name.split("x"))
                found[LinearProblem(int(batch), c, k, dtype, numerics)] = None
                continue
            with (FOLDER / f"{name}.csv").open() as file:
                for row in csv.DictReader(file):
                    found[layer_of(row, int(batch), dtype, numerics, direction)] = None
    return list(found)


def layer_of(row: dict[str, str], n: int, dtype: str, numerics: str, direction: str) -> Layer:
    """The convolution of one row; a row with a filter depth `t` is a three-dimensional one."""
    rest: dict[str, Any] = {"numerics": numerics, "direction": direction}
    if "t" in row:
        c, d, h, w, k, t, r, s, *others, groups = (int(row[name]) for name in VOLUME_COLUMNS[1:])
        sides: list[Any] = [tuple(others[i : i + 3]) for i in (0, 3, 6)]
        return Conv3dProblem(
            n, c, (d, h, w), k, (t, r, s), *sides, groups=groups, layout="ndhwc", dtype=dtype, **rest
        )  # fmt: skip
    sizes: dict[str, Any] = {size: int(row[size]) for size in SIZES} | {"n": n}
    types: dict[str, Any] = dict.fromkeys(("x_dtype", "weight_dtype", "y_dtype"), dtype)
    return ConvProblem(**sizes, **types, layout="nhwc", **rest)


def short(problem: Layer) -> str:
    """A layer's name for people."""
    if isinstance(problem, LinearProblem):
        return f"linear {problem.c}>{problem.k}"
    if isinstance(problem, Conv3dProblem):
        window, stride = ("x".join(map(str, sides)) for sides in (problem.window, problem.stride))
        return f"{problem.c}>{problem.k} {window}/{stride} @{'x'.join(map(str, problem.size))}"
    stride = f"/{problem.stride_h}" if problem.stride_h > 1 else ""
    groups = f" g{problem.groups}" if problem.groups > 1 else ""
    direction = "" if problem.direction == "fprop" else f" {problem.direction}"
    return f"{problem.c}>{problem.k} {problem.r}x{problem.s}{stride}{groups} @{problem.h} n{problem.n}{direction}"


def direction_of(problem: Layer) -> str:
    """A linear layer is measured forward."""
    return "fprop" if isinstance(problem, LinearProblem) else problem.direction


def exact(problem: Layer, x: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    """The problem's result in float64, by torch."""
    x, weight, dy = (t.double().contiguous() for t in (x, weight, dy))
    if isinstance(problem, LinearProblem):
        return functional.linear(x, weight)
    stride, pad, dilation, groups = torch_sizes(problem)
    if problem.direction == "fprop":
        convolve = functional.conv3d if isinstance(problem, Conv3dProblem) else functional.conv2d
        return convolve(x, weight, None, stride, pad, dilation, groups)
    wanted = [problem.direction == "dgrad", problem.direction == "wgrad", False]
    made = torch.ops.aten.convolution_backward.default(
        dy, x, weight, None, stride, pad, dilation, False, [0] * len(stride), groups, wanted
    )
    found = made[0] if problem.direction == "dgrad" else made[1]
    assert found is not None
    return found


@dataclass
class Operands:
    """One set of buffers: what a launch reads and writes, and the constants that are packed before."""

    args: tuple[torch.Tensor, ...]
    constants: list[torch.Tensor]
    result: torch.Tensor

    def buffers(self, executable: Executable) -> Buffers:
        """The launch's buffers; packs the constants."""
        return Buffers(self.args, [self.result], executable.pack(self.constants))


def operands(problem: Layer, x: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor) -> Operands:
    """Who is who in a direction; 4-D and 5-D tensors are channels_last but a constant weight, which comes as torch makes it."""
    direction = direction_of(problem)
    if direction == "fprop":
        return Operands((_laid(x),), [weight.contiguous()], _laid(torch.empty_like(dy)))
    if direction == "dgrad":
        return Operands((_laid(dy), _laid(weight)), [], _laid(torch.empty_like(x)))
    return Operands((_laid(x), _laid(dy)), [], _laid(torch.empty_like(weight)))


def _laid(tensor: torch.Tensor) -> torch.Tensor:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return tensor.contiguous(memory_format=formats.get(tensor.dim(), torch.contiguous_format))


@dataclass
class Data:
    """Buffers of one problem: `sets` rotate in a timed graph; two more with known results are for checking."""

    problem: Layer
    sets: list[Operands]
    integer: tuple[Operands, torch.Tensor]
    normal: tuple[Operands, torch.Tensor]

    @staticmethod
    def of(problem: Layer, sets: int, device: str = "cuda") -> Data:
        """Random data and its float64 results."""
        dtype = DTYPES[problem.x_spec.dtype]
        shapes = [spec.shape for spec in (problem.x_spec, problem.weight_spec, problem.y_spec)]
        scale = problem.reduction_length**-0.5

        def normal() -> list[torch.Tensor]:
            drawn = [torch.randn(shape, device=device) for shape in shapes]
            scaled = 2 if direction_of(problem) == "wgrad" else 1  # the operand that keeps results near 1
            drawn[scaled] *= scale
            return [t.to(dtype) for t in drawn]

        integers = [torch.randint(-1, 2, shape, device=device).to(dtype) for shape in shapes]
        integers[0] *= 2
        drawn = normal()
        rotating = [operands(problem, *normal()) for _ in range(sets - 1)]
        checked = operands(problem, *drawn)
        return Data(
            problem, [checked, *rotating],
            (operands(problem, *integers), exact(problem, *integers)), (checked, exact(problem, *drawn)),
        )  # fmt: skip


def bound(problem: Layer) -> float:
    """Relative L2 error that a result may have."""
    if problem.x_spec.dtype == "fp16":
        return 4e-4
    if problem.x_spec.dtype == "bf16":
        return 3e-3
    return 0.6 * 2**-23 * max(1, problem.reduction_length) ** 0.5 if problem.numerics == "strict" else 6e-4


def check(executable: Executable, data: Data, workspace: torch.Tensor | None) -> tuple[float, str]:
    """Relative error on normal data, and what is wrong: integers have to be exact."""
    error = float("nan")
    for given, expected in (data.integer, data.normal):
        given.result.fill_(float("nan"))
        if workspace is not None:
            workspace.fill_(255)
        buffers = given.buffers(executable)
        executable.launch(buffers, workspace)
        made = buffers.results[0]
        assert made is not None
        if expected is data.integer[1]:
            if not torch.equal(made, expected.to(made.dtype)):
                return error, "wrong on integers"
        else:
            error = ((made.double() - expected).norm() / expected.norm()).item()
    return error, "" if error <= bound(data.problem) else f"relative error {error:.2g}"
