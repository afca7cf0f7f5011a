"""cuda.dgrad: gradients of x with a stride of 1, as convolutions by `igemm_swap_ab.cu` (docs/kernels/hopper.md)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from convoy.engines.base import Buffers, Executable, Packed
from convoy.engines.gpu.device_tensors import dense_nhwc
from convoy.engines.hopper.hopper_support_checks import im2col
from convoy.engines.hopper.igemm_dynamic_weight import UnpackedExecutable, half_product
from convoy.engines.hopper.igemm_swap_ab import SwappedForms
from convoy.engines.hopper.igemm_swap_ab_tile_config import SwapAbTile
from convoy.engines.hopper.igemm_swap_ab_variants import TurnedForm
from convoy.engines.hopper.tensor_maps import FilterMap
from convoy.problem import ConvProblem, Epilogue, Problem
from convoy.support import Support
from convoy.target import Target

BOX = 64
"""Rows of a box of a weight that products transpose."""


class GradientExecutable(UnpackedExecutable):
    """dx of one problem: a convolution of dy with the transposed weight."""

    def pack(self, constants: Sequence[torch.Tensor]) -> Packed:
        """Nothing: the weight is an argument."""
        del constants
        return ()

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        """Launch the kernel; an empty batch needs none."""
        del workspace
        dy, weight = dense_nhwc("dy", buffers.args[0]), dense_nhwc("weight", buffers.args[1])
        if self.problem.n:
            self.multiply(dy, Buffers((dy,), buffers.results, (weight,)))


def turned(problem: ConvProblem) -> ConvProblem:
    """The convolution over dy that computes dx at stride 1: channels and filters are exchanged."""
    return replace(
        problem, direction="fprop", c=problem.k, k=problem.c, h=problem.p, w=problem.q, epilogue=Epilogue(),
        pad_h=(problem.r - 1) * problem.dilation_h - problem.pad_h,
        pad_w=(problem.s - 1) * problem.dilation_w - problem.pad_w,
    )  # fmt: skip


class GradientEngine(SwappedForms):
    """Data gradients of stride 1."""

    id = "cuda.dgrad"
    writes_slices = True
    devices = ("cuda",)
    tile_config = TurnedForm

    def supports(self, problem: Problem, target: Target) -> Support:
        """Data gradients of stride 1 in fp16 or bf16 and NHWC on Hopper, c and k multiples of 8."""
        if not (found := half_product(problem, target, "dgrad")):
            return found
        assert isinstance(problem, ConvProblem)
        if problem.stride_h * problem.stride_w != 1:
            return Support.no(f"needs a stride of 1, got {problem.stride_h}x{problem.stride_w}")
        reach_h, reach_w = (problem.r - 1) * problem.dilation_h, (problem.s - 1) * problem.dilation_w
        if problem.pad_h > reach_h or problem.pad_w > reach_w:
            return Support.no("needs padding no wider than the filter reaches")
        return im2col(turned(problem))

    def computed(self, problem: ConvProblem) -> ConvProblem:
        """See `turned`."""
        return turned(problem)

    def build_tile(self, problem: ConvProblem, form: SwapAbTile, target: Target) -> Executable:
        """Compile one configuration; needs no GPU."""
        return GradientExecutable(self.id, turned(problem), form, target, FilterMap.of(problem, BOX))


ENGINE = GradientEngine()
