"""pruned.sparse24: convolutions whose weights are 2:4 sparse, on Hopper's sparse tensor cores (docs/kernels/sparse-weights.md).

    y = activation(conv(x, weight) + bias + residual)    -->    half the products, 0.56 of the weight's bytes

A mask will do where of every four neighbouring channels at most two have values, for each filter and tap. Values may change under
one mask; a value where the mask has none is refused when weights are packed.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from convoy.engines.base import Executable
from convoy.engines.hopper.hopper_support_checks import hopper_alone, im2col
from convoy.engines.hopper.igemm_swap_ab import SwappedExecutable, SwappedForms
from convoy.engines.hopper.igemm_swap_ab_tile_config import SwapAbTile as DenseForm
from convoy.engines.sparse_weights.codegen.lower_mask import positions
from convoy.engines.sparse_weights.mask_check import check_zeros
from convoy.engines.sparse_weights.mask_support_checks import hopper_convolution
from convoy.engines.sparse_weights.sparse24_packing import Packing, crowded
from convoy.engines.sparse_weights.sparse24_tile import Sparse24Tile
from convoy.problem import ConvProblem, Problem, WeightMask
from convoy.support import Support
from convoy.target import Target
from convoy.typed_torch import from_numpy


@lru_cache(maxsize=256)
def _crowded(mask: WeightMask) -> int:
    return crowded(positions(mask))


class SparseExecutable(SwappedExecutable):
    """One tile configuration for one problem."""

    def __init__(self, engine: str, problem: ConvProblem, form: DenseForm, target: Target) -> None:
        super().__init__(engine, problem, form, target)
        assert problem.mask is not None
        mask = positions(problem.mask)
        self._mask = from_numpy(mask)
        self.packing = Packing(mask, form.filters, form.cluster, taps_first=form.halo > 0)

    def in_order(self, weight: torch.Tensor) -> torch.Tensor:
        """Values and metadata; raises InputError for a value where the mask has none."""
        check_zeros(weight, self._mask)
        return self.packing.pack(weight)


class Sparse24Engine(SwappedForms):
    """Sparse products of compressed weights; see `hopper/swapped.cu`."""

    id = "pruned.sparse24"
    devices = ("cuda",)
    writes_slices = True
    version = 3
    quick_settings = 32
    """All of a space: half of these are tried before any is taken for the best."""

    reads_mask = True
    tile_config = Sparse24Tile

    def supports(self, problem: Problem, target: Target) -> Support:
        """Forward convolutions on Hopper in fp16 or bf16 and NHWC, c and k multiples of 8, whose mask is 2:4 along c."""
        if not (support := hopper_convolution(problem, target)):
            return support
        assert isinstance(problem, ConvProblem)
        assert problem.mask is not None
        if not (fits := im2col(problem)):
            return fits
        if found := _crowded(problem.mask):
            return Support.no(f"needs at most two values in every four channels, got more in {found} groups of four")
        return hopper_alone(target)

    def build_tile(self, problem: ConvProblem, form: DenseForm, target: Target) -> Executable:
        """Compile one tile configuration; needs no GPU."""
        return SparseExecutable(self.id, problem, form, target)


ENGINE = Sparse24Engine()
