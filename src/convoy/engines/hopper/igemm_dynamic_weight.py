"""cuda.fresh: `igemm_swap_ab.cu` with weights that are not packed, for training (docs/kernels/hopper.md)."""

from __future__ import annotations

from typing import Any

import torch

from convoy.engines.base import Executable
from convoy.engines.gpu.device_tensors import dense_nhwc
from convoy.engines.hopper.hopper_support_checks import copied_product
from convoy.engines.hopper.igemm_swap_ab import SwappedExecutable, SwappedForms
from convoy.engines.hopper.igemm_swap_ab_tile_config import SwapAbTile
from convoy.engines.hopper.igemm_swap_ab_variants import UnpackedForm
from convoy.engines.hopper.tensor_maps import FilterMap
from convoy.problem import ConvProblem, Problem
from convoy.support import Support
from convoy.target import Target


class UnpackedExecutable(SwappedExecutable):
    """The kernel of one tile configuration for one problem.

    Args:
        engine: the engine's id, for messages.
        problem: the convolution to compute.
        form: the tile configuration.
        target: the device.
        weight_map: the TMA descriptor of the weight, which is not packed.
    """

    def __init__(
        self, engine: str, problem: ConvProblem, form: SwapAbTile, target: Target, weight_map: FilterMap
    ) -> None:
        super().__init__(engine, problem, form, target)
        self.weight_map = weight_map

    def in_order(self, weight: torch.Tensor) -> torch.Tensor:
        """The weight itself; raises LaunchError unless its memory is [k, r, s, c]."""
        return dense_nhwc("weight", weight)

    def weight_argument(self, weight: torch.Tensor) -> Any:
        """The weight's tensor map."""
        return self.weight_map.encode(self.problem.weight_dtype, weight)


def half_product(problem: Problem, target: Target, direction: str) -> Support:
    """Accept a dense convolution in half types: only these products can transpose an operand."""
    if not (found := copied_product(problem, target, direction)):
        return found
    assert isinstance(problem, ConvProblem)
    if problem.x_dtype not in ("fp16", "bf16"):
        return Support.no(f"needs fp16 or bf16, got {problem.x_dtype}")
    return Support.yes()


class FreshEngine(SwappedForms):
    """Convolutions whose weight changes from call to call."""

    id = "cuda.fresh"
    devices = ("cuda",)
    writes_slices = True
    tile_config = UnpackedForm

    def supports(self, problem: Problem, target: Target) -> Support:
        """Forward convolutions with a dynamic weight in fp16 or bf16 and NHWC on Hopper, c and k multiples of 8."""
        if not (found := half_product(problem, target, "fprop")):
            return found
        assert isinstance(problem, ConvProblem)
        if not problem.dynamic_weight:
            return Support.no("reads weights that change from call to call; cuda.swapped packs the others")
        return Support.yes()

    def build_tile(self, problem: ConvProblem, form: SwapAbTile, target: Target) -> Executable:
        """Compile one configuration; needs no GPU."""
        return UnpackedExecutable(self.id, problem, form, target, FilterMap.of(problem, form.filters))


ENGINE = FreshEngine()
