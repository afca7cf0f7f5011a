"""cpu.depthwise: depthwise convolution with a fused epilogue in NHWC, computed in fp32, in C (docs/kernels/cpu.md)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch

from convoy.engines.base import Engine, Executable, Knobs, Packed
from convoy.engines.cost_model import KernelWork, estimate_us
from convoy.engines.cpu.native_launch import KernelSource, Native, NativeExecutable
from convoy.engines.cpu.weight_tiles import ACTIVATIONS, STORED, VECTOR_FLAGS, storage_kernel, taken
from convoy.problem import ConvProblem, Problem
from convoy.support import Support
from convoy.target import Target

SOURCE: Final = Path(__file__).with_name("depthwise.c")

MOST_TAPS: Final = 49
"""Filter taps whose weights fit in registers beside the sums, as in depthwise.c."""

SIDES: Final = (3, 5, 7)
"""Sides of the square filters that have a loop of their own in depthwise.c."""

_CONVOLUTION: Final = (
    "n", "c", "h", "w", "k", "r", "s", "pad_h", "pad_w", "stride_h", "stride_w", "dilation_h", "dilation_w", "p", "q",
)  # fmt: skip


class _DepthwiseSizes(ctypes.Structure):
    """`Sizes` of depthwise.c."""

    _fields_ = tuple((name, ctypes.c_int64) for name in (*_CONVOLUTION, "activation", "residual", "threads"))


def kernel(problem: ConvProblem) -> KernelSource:
    """The kernel for filters of the problem's side: one for all sides takes gcc three times as long as one for 3x3."""
    side = problem.r if problem.r == problem.s and problem.r in SIDES else 0
    found = storage_kernel(SOURCE, CpuDepthwise.id, f"convoy_depthwise{side or ''}", problem.x_dtype, VECTOR_FLAGS)
    return replace(found, flags=(*found.flags, f"-DSIDE={side}", f"-DDEPTHWISE={found.function}"))


class _Depthwise(NativeExecutable):
    """One call of the library."""

    def __init__(self, problem: ConvProblem) -> None:
        self._problem = problem
        self._sizes = _DepthwiseSizes(
            **{name: getattr(problem, name) for name in _CONVOLUTION},
            activation=ACTIVATIONS.index(problem.epilogue.activation),
            residual=problem.epilogue.residual,
            threads=torch.get_num_threads(),
        )
        self.use(kernel(problem))

    def pack(self, constants: Sequence[torch.Tensor]) -> Packed:
        """The weight as [r, s, c], and the bias, zero where there is none, in fp32."""
        weight = constants[0].detach().float()
        bias = constants[1].detach().float() if self._problem.epilogue.bias else weight.new_zeros(self._problem.c)
        return weight[:, 0].permute(1, 2, 0).contiguous(), bias.contiguous()

    def native(self, constants: Packed) -> Native | None:
        """Multiply, add, activate."""
        if not self._problem.n:
            return None
        weight, bias = constants
        residual = ("arg", 1) if self._problem.epilogue.residual else None
        return Native(self._sizes, (("arg", 0), weight, bias, residual, ("result", 0)))


class CpuDepthwise(Engine):
    """Depthwise convolutions in nhwc, in fp32 or bf16, on a CPU."""

    id = "cpu.depthwise"
    family = "direct"
    devices = ("cpu",)
    native = True
    builds_in_threads = True
    trusted = False

    def supports(self, problem: Problem, target: Target) -> Support:
        """Forward convolutions with one filter a channel in nhwc, with a residual and an activation."""
        support = taken(problem, target, depthwise=True, dtypes=STORED)
        if support and isinstance(problem, ConvProblem) and problem.r * problem.s > MOST_TAPS:
            return Support.no(f"needs filters of at most {MOST_TAPS} values, got {problem.r} x {problem.s}")
        return support

    def estimate_us(self, problem: Problem, knobs: Knobs, target: Target) -> float | None:
        """The multiplications, and each tensor once."""
        assert isinstance(problem, ConvProblem)
        return estimate_us(KernelWork(problem.flops, problem.bytes_min, 1), target)

    def build(self, problem: Problem, knobs: Knobs, target: Target) -> Executable:
        """The library is compiled once for all problems."""
        assert isinstance(problem, ConvProblem)
        return _Depthwise(problem)


ENGINE = CpuDepthwise()
