"""cuda.split_fp32: strict fp32 convolution by products of half types, with `igemm_swap_ab.cu` (docs/kernels/strict-fp32.md)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import torch

from convoy.engines.base import Buffers, Executable, Packed
from convoy.engines.gpu.device_tensors import scratch
from convoy.engines.gpu.gpu_support_checks import conv_support
from convoy.engines.hopper.hopper_support_checks import hopper_alone, im2col, whole_vectors
from convoy.engines.hopper.igemm_swap_ab import SwappedExecutable, SwappedForms, in_blocks
from convoy.engines.hopper.igemm_swap_ab_tile_config import SwapAbTile
from convoy.engines.hopper.igemm_swap_ab_variants import PlanesForm
from convoy.engines.triton.split_planes import PlaneSplit, plane_bytes, split_us, split_weight
from convoy.problem import ConvProblem, Knobs, Problem, TensorSpec
from convoy.support import Support
from convoy.target import Target

_PLANE_BYTES: Final = 2
"""Bytes of a value in a plane."""


def of_planes(problem: ConvProblem) -> ConvProblem:
    """The same problem with x and weight in a half type."""
    return replace(problem, x_dtype="fp16", weight_dtype="fp16")


def planes_in_blocks(weight: torch.Tensor, form: SwapAbTile) -> tuple[torch.Tensor, torch.Tensor]:
    """Both planes of each block, one after the other (`in_blocks`), and 1 / scale of every filter."""
    high, low, inverse = split_weight(weight)
    return torch.stack((in_blocks(high, form), in_blocks(low, form)), dim=2), inverse


class SplitExecutable(SwappedExecutable):
    """Three launches (largest |x|, planes, product); two if x comes with its maximum."""

    def __init__(self, engine: str, problem: ConvProblem, form: SwapAbTile, target: Target) -> None:
        super().__init__(engine, of_planes(problem), form, target)
        self.planes = PlaneSplit(engine, problem.x_spec.elements, target)
        self.workspace_bytes = plane_bytes(problem.x_spec.elements)

    def pack(self, constants: Sequence[torch.Tensor]) -> Packed:
        """Both planes of the weight, the bias, and 1 / scale of every filter."""
        planes, inverse = planes_in_blocks(constants[0].detach(), self.form)
        return (planes, *(bias.detach().contiguous() for bias in constants[1:]), inverse)

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        """Split x into planes, and multiply."""
        room = scratch(workspace, self.workspace_bytes)
        assert room is not None
        marks = buffers.args[-1] if len(buffers.args) > 1 + self.problem.epilogue.residual else None
        planes, inverse = self.planes.split(buffers.args[0], marks, buffers.constants[0], room)
        self.multiply(planes, buffers, (inverse, buffers.constants[-1]))

    def accept_marks(self, spec: TensorSpec) -> bool:
        """See `PlaneSplit`."""
        return self.planes.accept_marks(spec)


class SplitFp32Engine(SwappedForms):
    """fp16x3 with short sums; see `igemm_swap_ab.cu`."""

    id = "cuda.split_fp32"
    devices = ("cuda",)
    writes_slices = True
    only_numerics = ("strict",)
    tile_config = PlanesForm

    def supports(self, problem: Problem, target: Target) -> Support:
        """fp32 NHWC convolutions on Hopper, c and k multiples of 8."""
        if not (found := conv_support(problem, target, 90)) or not (found := hopper_alone(target)):
            return found
        assert isinstance(problem, ConvProblem)
        if problem.x_dtype != "fp32":
            return Support.no(f"splits fp32, got {problem.x_dtype}")
        if problem.groups != 1:
            return Support.no(f"needs groups = 1, got {problem.groups}")
        if not problem.x_spec.elements:
            return Support.no("needs at least one image")
        return whole_vectors(problem, _PLANE_BYTES) and im2col(problem)

    def computed(self, problem: ConvProblem) -> ConvProblem:
        """See `of_planes`."""
        return of_planes(problem)

    def estimate_tile_us(self, problem: ConvProblem, form: SwapAbTile, units: int) -> float:
        """The estimate of the product and of splitting x."""
        return super().estimate_tile_us(problem, form, units) + split_us(problem.x_spec.elements)

    def workspace_bytes(self, problem: Problem, knobs: Knobs) -> int:
        """Bytes of the planes of x."""
        del knobs
        assert isinstance(problem, ConvProblem)
        return plane_bytes(problem.x_spec.elements)

    def build_tile(self, problem: ConvProblem, form: SwapAbTile, target: Target) -> Executable:
        """Compile one configuration; needs no GPU."""
        return SplitExecutable(self.id, problem, form, target)


ENGINE = SplitFp32Engine()
