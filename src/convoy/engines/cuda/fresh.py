"""cuda.fresh: `swapped.cu` on weights as they lie, for training (docs/kernels/cuda_swapped.md)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from convoy.engines.base import Executable
from convoy.engines.cuda.compiled import absence
from convoy.engines.cuda.maps import FilterMap, PixelMap
from convoy.engines.cuda.swapped import SwappedExecutable
from convoy.engines.cuda.swapped_form import Form
from convoy.engines.cuda.swapped_forms import estimate_us, forms
from convoy.engines.cuda.swapped_kinds import UnpackedForm
from convoy.engines.formed import FormedEngine
from convoy.engines.triton.requirements import product_support
from convoy.engines.triton.tensors import dense_nhwc
from convoy.problem import ConvProblem, Problem
from convoy.support import Support
from convoy.target import Target

_WHOLE = 8
"""Channels and filters come in multiples of sixteen bytes."""


class UnpackedExecutable(SwappedExecutable):
    """One form for one problem.

    Args:
        engine: whose it is.
        problem: the convolution that is computed.
        form: how the work is cut.
        target: the device.
        weight_map: of the weight as it lies.
    """

    def __init__(
        self, engine: str, problem: ConvProblem, form: Form, target: Target, weight_map: FilterMap
    ) -> None:  # fmt: skip
        super().__init__(engine, problem, form, target)
        self.weight_map = weight_map

    def in_order(self, weight: torch.Tensor) -> torch.Tensor:
        """As it is; raises LaunchError where it does not lie as [k, r, s, c]."""
        return dense_nhwc("weight", weight)

    def weight_argument(self, weight: torch.Tensor) -> Any:
        """Its descriptor."""
        return self.weight_map.encode(self.problem.weight_dtype, weight)


def whole_support(problem: Problem, target: Target, direction: str) -> Support:
    """Half types on Hopper, c and k multiples of 8."""
    if not (found := product_support(problem, target, direction, empty=True)):
        return found
    assert isinstance(problem, ConvProblem)
    if target.capability != 90:
        return Support.no(f"is made for compute capability 9.0 alone, got {target.arch}")
    if problem.x_dtype not in ("fp16", "bf16"):
        return Support.no(f"needs fp16 or bf16, got {problem.x_dtype}")
    if problem.c % _WHOLE or problem.k % _WHOLE:
        return Support.no(f"needs c and k as multiples of {_WHOLE}, got {problem.c} and {problem.k}")
    return Support.yes()


class FreshEngine(FormedEngine[UnpackedForm]):
    """Convolutions whose weight changes from call to call."""

    id = "cuda.fresh"
    version = 1
    family = "implicit_gemm"
    trusted = False
    quick_settings = 6
    form = UnpackedForm

    def supports(self, problem: Problem, target: Target) -> Support:
        """Forward convolutions with a fresh weight in fp16 or bf16 and NHWC on Hopper, c and k multiples of 8."""
        if not (found := whole_support(problem, target, "fprop")):
            return found
        assert isinstance(problem, ConvProblem)
        if not problem.fresh_weight:
            return Support.no("reads weights that change from call to call; cuda.swapped packs the others")
        if not PixelMap.of(problem, 64).fits(problem):
            return Support.no("needs padding and filter under 128, and strides up to 8")
        return Support.no(absence()) if absence() else Support.yes()

    def forms(self, problem: ConvProblem, units: int) -> Sequence[UnpackedForm]:
        """See the function of this name."""
        return forms(problem, units, UnpackedForm)

    def guess_us(self, problem: ConvProblem, form: UnpackedForm, units: int) -> float:
        """See `estimate_us` above."""
        return estimate_us(problem, form, units)

    def executable(self, problem: ConvProblem, form: UnpackedForm, target: Target) -> Executable:
        """Compile one form; no GPU is needed."""
        return UnpackedExecutable(self.id, problem, form, target, FilterMap.of(problem, form.filters))


ENGINE = FreshEngine()
