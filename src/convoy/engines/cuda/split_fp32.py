"""cuda.split_fp32: strict fp32 convolution by products of halves, with `swapped.cu` (docs/kernels/split_fp32.md)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import torch

from convoy.engines.base import Buffers, Executable, Packed
from convoy.engines.cuda.compiled import absence
from convoy.engines.cuda.maps import PixelMap
from convoy.engines.cuda.swapped import SwappedExecutable, in_blocks
from convoy.engines.cuda.swapped_forms import estimate_us, forms
from convoy.engines.cuda.swapped_kinds import PlanesForm
from convoy.engines.formed import FormedEngine
from convoy.engines.triton.planes import PlaneSplit, plane_bytes, split_weight
from convoy.engines.triton.requirements import conv_support
from convoy.engines.triton.tensors import scratch
from convoy.problem import ConvProblem, Knobs, Problem, TensorSpec
from convoy.support import Support
from convoy.target import Target

_WHOLE: Final = 8
"""Channels of a plane come in multiples of sixteen bytes."""

_SPLIT_US: Final = 2.0
_SPLIT_BYTES_US: Final = 4e6
"""The two launches that split x, as `triton.split_fp32` takes them to be: 12 bytes a value."""


def of_planes(problem: ConvProblem) -> ConvProblem:
    """The problem whose x and weight are halves."""
    return replace(problem, x_dtype="fp16", weight_dtype="fp16")


def planes_in_blocks(weight: torch.Tensor, form: PlanesForm) -> tuple[torch.Tensor, torch.Tensor]:
    """Both planes of each block, one behind the other (`in_blocks`), and 1 / s of every filter."""
    high, low, inverse = split_weight(weight)
    return torch.stack((in_blocks(high, form), in_blocks(low, form)), dim=2), inverse


class SplitExecutable(SwappedExecutable):
    """Three launches (largest |x|, planes, product); two where x has marks."""

    def __init__(self, engine: str, problem: ConvProblem, form: PlanesForm, target: Target) -> None:
        super().__init__(engine, of_planes(problem), form, target)
        self.planes = PlaneSplit(engine, problem.x_spec.elements, target)
        self.workspace_bytes = plane_bytes(problem.x_spec.elements)

    def pack(self, constants: Sequence[torch.Tensor]) -> Packed:
        """Both planes of the weight; the bias; 1 / s of every filter."""
        assert isinstance(self.form, PlanesForm)
        planes, inverse = planes_in_blocks(constants[0].detach(), self.form)
        return (planes, *(bias.detach().contiguous() for bias in constants[1:]), inverse)

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        """Split x, and multiply."""
        room = scratch(workspace, self.workspace_bytes)
        assert room is not None
        marks = buffers.args[-1] if len(buffers.args) > 1 + self.problem.epilogue.residual else None
        planes, inverse = self.planes.split(buffers.args[0], marks, buffers.constants[0], room)
        self.multiply(planes, buffers, (inverse, buffers.constants[-1]))

    def accept_marks(self, spec: TensorSpec) -> bool:
        """See `PlaneSplit`."""
        return self.planes.accept_marks(spec)


class SplitFp32Engine(FormedEngine[PlanesForm]):
    """fp16x3 with short sums; see `swapped.cu`."""

    id = "cuda.split_fp32"
    version = 1
    family = "implicit_gemm"
    trusted = False
    quick_settings = 6
    form = PlanesForm

    def supports(self, problem: Problem, target: Target) -> Support:
        """fp32 NHWC convolutions on Hopper, c and k multiples of 8."""
        if not (found := conv_support(problem, target, 90)):
            return found
        assert isinstance(problem, ConvProblem)
        if target.capability != 90:
            return Support.no(f"is made for compute capability 9.0 alone, got {target.arch}")
        if problem.x_dtype != "fp32":
            return Support.no(f"splits fp32, got {problem.x_dtype}")
        if problem.groups != 1:
            return Support.no(f"needs groups = 1, got {problem.groups}")
        if problem.c % _WHOLE or problem.k % _WHOLE:
            return Support.no(f"needs c and k as multiples of {_WHOLE}, got {problem.c} and {problem.k}")
        if not problem.x_spec.elements:
            return Support.no("needs at least one image")
        if not PixelMap.of(problem, 64).fits(problem):
            return Support.no("needs padding and filter under 128, and strides up to 8")
        return Support.no(absence()) if absence() else Support.yes()

    def forms(self, problem: ConvProblem, units: int) -> Sequence[PlanesForm]:
        """See the function of this name."""
        return forms(of_planes(problem), units, PlanesForm)

    def guess_us(self, problem: ConvProblem, form: PlanesForm, units: int) -> float:
        """See `estimate_us` above, and what splits x."""
        return estimate_us(of_planes(problem), form, units) + _SPLIT_US + 12 * problem.x_spec.elements / _SPLIT_BYTES_US

    def workspace_bytes(self, problem: Problem, knobs: Knobs) -> int:
        """Planes of x."""
        del knobs
        assert isinstance(problem, ConvProblem)
        return plane_bytes(problem.x_spec.elements)

    def executable(self, problem: ConvProblem, form: PlanesForm, target: Target) -> Executable:
        """Compile one form; no GPU is needed."""
        return SplitExecutable(self.id, problem, form, target)


ENGINE = SplitFp32Engine()
