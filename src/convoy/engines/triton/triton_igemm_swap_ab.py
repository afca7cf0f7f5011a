"""triton.swapped: convolution on Hopper's tensor cores by swap-AB, both operands loaded by TMA (docs/kernels/triton.md)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from convoy.engines.base import Engine, Executable
from convoy.engines.gpu.gpu_support_checks import product_support
from convoy.engines.triton.igemm_swap_ab_launch import TritonSwapABExecutable, workspace_bytes
from convoy.engines.triton.triton_build import shared_limit
from convoy.engines.triton.triton_tile_search import candidate_tiles
from convoy.engines.triton.triton_tiles import ConvView, TritonTile, conv_view, estimate_us
from convoy.problem import ConvProblem, Knobs, Problem
from convoy.support import Support
from convoy.target import Target

_LEAST_CHANNELS = 16
"""Least channels of an iteration: the smallest reduction of Triton's dot, whatever the type."""


def block_channels(view: ConvView) -> tuple[int, ...]:
    """Channels an iteration: 32 to 256 bytes of them and 16 at least; with the strided view a divisor of c."""
    found = tuple(size // view.bytes_each for size in (256, 128, 64, 32) if size // view.bytes_each >= _LEAST_CHANNELS)
    if view.strided:
        return tuple(b for b in found if view.c % b == 0)[:3]
    least = max(_LEAST_CHANNELS, (32 if view.c * view.bytes_each <= 32 else 64) // view.bytes_each)
    return tuple(b for b in found if b >= least and (b < 2 * view.c or b == least))[:3]


def tensor_support(view: ConvView, least: int = _LEAST_CHANNELS) -> Support:
    """TMA's restrictions on the sizes; with a stride, blocks of at least `least` channels that divide c."""
    vector = 16 // view.bytes_each
    if view.c % vector or view.k % vector:
        return Support.no(f"needs c and k as multiples of {vector}, got {view.c} and {view.k}")
    if view.strided:
        if view.h % view.stride_h or view.w % view.stride_w:
            return Support.no(f"needs h and w as multiples of the stride, got {view.h} x {view.w}")
        whole = max(least, 32 // view.bytes_each)
        if view.c % whole:
            return Support.no(f"needs c as a multiple of {whole} with a stride, got {view.c}")
        if max(view.stride_h, view.stride_w) > 4:
            return Support.no("needs a stride of at most 4")
    return Support.yes()


def tile_space(view: ConvView, target: Target, limit: int = 24) -> list[TritonTile]:
    """Tiles worth trying, the likely best first, all with dependent launch, those without split with weights fetched ahead.

    The best few follow with the other choice of fetching, and the best two without dependent launch.
    """
    smallest = 32 if view.k <= 32 else 64
    tiles = candidate_tiles(
        view, block_cs=block_channels(view), pixels=(16, 32, 64, 128, 256), ks=(smallest, 128), units=target.units,
        limit=limit, shared=shared_limit(target),
    )  # fmt: skip
    first = [replace(tile, pdl=True, prefetch=tile.split == 1) for tile in tiles]
    other = [replace(tile, prefetch=not tile.prefetch) for tile in first[:4]]
    return [*first, *other, *tiles[:2]]


class TritonSwapABEngine(Engine):
    """out^T[k, pixels] = W · X^T, tap by tap; see `kernels/igemm_swap_ab_kernel.py`."""

    id = "triton.swapped"
    family = "implicit_gemm"
    devices = ("cuda",)
    writes_slices = True
    trusted = False
    pure_space = True

    def supports(self, problem: Problem, target: Target) -> Support:
        """Dense NHWC convolutions on Hopper, c and k multiples of 16 bytes; fp32 as TF32 where the numerics allow."""
        if not (found := product_support(problem, target, empty=True)):
            return found
        assert isinstance(problem, ConvProblem)
        return tensor_support(conv_view(problem))

    def space(self, problem: Problem, target: Target) -> Sequence[Knobs]:
        """Tiles by rising estimated time."""
        assert isinstance(problem, ConvProblem)
        return [tile.knobs for tile in tile_space(conv_view(problem), target)]

    def workspace_bytes(self, problem: Problem, knobs: Knobs) -> int:
        """The partial sums of a split reduction."""
        assert isinstance(problem, ConvProblem)
        return workspace_bytes(conv_view(problem), TritonTile.of(knobs))

    def estimate_us(self, problem: Problem, knobs: Knobs, target: Target) -> float:
        """The tiles' cost model."""
        assert isinstance(problem, ConvProblem)
        return estimate_us(conv_view(problem), TritonTile.of(knobs), target.units)

    def build(self, problem: Problem, knobs: Knobs, target: Target) -> Executable:
        """Compile one tile."""
        assert isinstance(problem, ConvProblem)
        return TritonSwapABExecutable(
            self.id, conv_view(problem), TritonTile.of(knobs), problem.x_dtype, problem.epilogue, target
        )


ENGINE = TritonSwapABEngine()
