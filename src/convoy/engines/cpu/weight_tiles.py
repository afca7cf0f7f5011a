"""Shared by the convolutions in C: source files, support checks, and weights packed in tiles of output channels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch

from convoy.engines.compilers.host_compiler import compiler_support, lanes
from convoy.engines.cpu.native_launch import PARALLEL_H, KernelSource
from convoy.engines.support_checks import plain_convolution
from convoy.problem import ConvProblem, LinearProblem, Problem
from convoy.support import Support
from convoy.target import Target

FLAGS: Final = ("-std=gnu11", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fno-unswitch-loops")
"""Unswitching would compile the inner loops twice, for images' borders and for the rest, and makes them slower as well."""

VECTOR_FLAGS: Final = (*("-O2" if flag == "-O3" else flag for flag in FLAGS), "-fpeel-loops")
"""The same for sources whose loops go over vectors and say where they are unrolled: -O3 takes gcc half as long again, and the
kernels are no faster. Without peeling, a first layer of three channels takes 4 % longer."""

VECTORS_H: Final = Path(__file__).with_name("activated.h")
"""The header of every source that works on vectors."""

ACTIVATIONS: Final = ("none", "relu", "relu6", "silu", "hardswish", "hardsigmoid", "sigmoid", "gelu")
"""Numbered as in the sources."""

STORED: Final = ("fp32", "bf16")
"""Dtypes of values that kernels compute with in fp32."""


def storage_kernel(
    source: Path, engine: str, function: str, dtype: str, optimize: tuple[str, ...] = FLAGS
) -> KernelSource:
    """The kernel of a source that stores values as `stored` (activated.h), for one dtype of `STORED`.

    Args:
        source: the source.
        engine: the engine's id.
        function: the function's name for fp32.
        dtype: how values are stored.
        optimize: the compiler's flags, `FLAGS` or `VECTOR_FLAGS`.
    """
    bf16 = dtype == "bf16"
    flags = (*optimize, f"-DLANES={lanes()}", *(("-DBF16",) if bf16 else ()))
    return KernelSource((PARALLEL_H, VECTORS_H, source), flags, engine, f"{function}_bf16" if bf16 else function)


CHEAP: Final = ACTIVATIONS[:3]
"""Those that cost an instruction or two."""


def taken(
    problem: Problem,
    target: Target,
    *,
    pools: bool = False,
    depthwise: bool = False,
    grouped: bool = False,
    dtypes: Sequence[str] = ("fp32",),
    activations: Sequence[str] = ACTIVATIONS,
) -> Support:
    """Forward convolutions in nhwc, with a residual and an activation, where there is a compiler.

    Args:
        problem: anything.
        target: the device.
        pools: whether the engine does an epilogue's pooling.
        depthwise: whether it is for one filter a channel; else it takes no groups.
        grouped: whether it takes groups all the same.
        dtypes: those that it takes.
        activations: those that it has.
    """
    if target.device != "cpu":
        return Support.no(f"runs on CPUs, got {target.device}")
    support = plain_convolution(problem, pools=pools)
    if not support or not isinstance(problem, ConvProblem):
        return support
    if problem.x_dtype not in dtypes:
        return Support.no(f"needs {' or '.join(dtypes)}, got {problem.x_dtype}")
    for name, wanted, given in (
        ("layout nhwc", "nhwc", problem.layout),
        ("groups = 1", 1, 1 if depthwise or grouped else problem.groups),
    ):
        if given != wanted:
            return Support.no(f"needs {name}, got {given}")
    if depthwise and not problem.c == problem.k == problem.groups:
        return Support.no(
            f"needs one filter per channel, got {problem.c} channels, {problem.k} filters, {problem.groups} groups"
        )
    if problem.epilogue.activation not in activations:
        return Support.no(f"supports the activations {', '.join(activations)}, got {problem.epilogue.activation}")
    return compiler_support()


def as_convolution(problem: LinearProblem) -> ConvProblem:
    """A linear layer as the 1x1 convolution that it is: its rows are the pixels of one image."""
    n, rows, dtype = min(1, problem.n), max(1, problem.n), problem.dtype
    return ConvProblem(
        n, problem.c, 1, rows, problem.k, 1, 1, layout="nhwc", x_dtype=dtype, weight_dtype=dtype, y_dtype=dtype,
        numerics=problem.numerics, epilogue=problem.epilogue,
    )  # fmt: skip


def in_tiles(problem: ConvProblem, constants: Sequence[torch.Tensor], tile: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The weight as [tiles, r, s, c, tile] and the bias as [tiles · tile], in fp32, zero for channels that are not there.

    Args:
        problem: the convolution.
        constants: the weight [k, c, r, s] (of a linear layer [k, c]), and the bias [k] where it has one.
        tile: output channels of a tile.
    """
    tiles = -(-problem.k // tile)
    weight = constants[0].detach().float()
    padded = weight.new_zeros(tiles * tile, problem.c, problem.r, problem.s)
    padded[: problem.k] = weight.view(-1, *padded.shape[1:])
    bias = weight.new_zeros(tiles * tile)
    if problem.epilogue.bias:
        bias[: problem.k] = constants[1].detach()
    return padded.view(tiles, tile, problem.c, problem.r, problem.s).permute(0, 3, 4, 2, 1).contiguous(), bias
