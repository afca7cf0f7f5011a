"""triton.pointwise: 1x1 convolutions and linear layers as one GEMM, by the swap-AB kernel over a row of pixels."""

from __future__ import annotations

from collections.abc import Sequence

from convoy.engines.base import Engine, Executable
from convoy.engines.gpu.gpu_support_checks import conv_support, is_strict, linear_support
from convoy.engines.triton.igemm_swap_ab_launch import TritonSwapABExecutable, workspace_bytes
from convoy.engines.triton.triton_igemm_swap_ab import tensor_support, tile_space
from convoy.engines.triton.triton_tiles import TritonTile, estimate_us, row_view
from convoy.problem import ConvProblem, Knobs, LinearProblem, Problem
from convoy.support import Support
from convoy.target import Target


class PointwiseEngine(Engine):
    """y[pixels, k] = x[pixels, c] · weight^T without regard to where a pixel lies, so that no tile is cut by a row's end."""

    id = "triton.pointwise"
    family = "gemm"
    devices = ("cuda",)
    writes_slices = True
    trusted = False
    pure_space = True

    def supports(self, problem: Problem, target: Target) -> Support:
        """1x1 filters of stride 1 without padding, and linear layers, on Hopper; no exact fp32."""
        if isinstance(problem, LinearProblem):
            found = linear_support(problem, target, 90)
        else:
            found = conv_support(problem, target, 90)
        if not found:
            return found
        assert isinstance(problem, ConvProblem | LinearProblem)
        if is_strict(problem):
            return Support.no("multiplies fp32 as TF32, which is not allowed here")
        if isinstance(problem, ConvProblem):
            if not problem.is_pointwise or problem.stride_h * problem.stride_w != 1:
                return Support.no("needs a 1x1 filter of stride 1 without padding")
            if problem.groups != 1:
                return Support.no(f"needs groups = 1, got {problem.groups}")
        return tensor_support(row_view(problem))

    def space(self, problem: Problem, target: Target) -> Sequence[Knobs]:
        """Tiles by rising estimated time."""
        assert isinstance(problem, ConvProblem | LinearProblem)
        return [tile.knobs for tile in tile_space(row_view(problem), target)]

    def workspace_bytes(self, problem: Problem, knobs: Knobs) -> int:
        """The partial sums of a split reduction."""
        assert isinstance(problem, ConvProblem | LinearProblem)
        return workspace_bytes(row_view(problem), TritonTile.of(knobs))

    def estimate_us(self, problem: Problem, knobs: Knobs, target: Target) -> float:
        """The tiles' cost model."""
        assert isinstance(problem, ConvProblem | LinearProblem)
        return estimate_us(row_view(problem), TritonTile.of(knobs), target.units)

    def build(self, problem: Problem, knobs: Knobs, target: Target) -> Executable:
        """Compile one tile."""
        assert isinstance(problem, ConvProblem | LinearProblem)
        dtype = problem.dtype if isinstance(problem, LinearProblem) else problem.x_dtype
        return TritonSwapABExecutable(self.id, row_view(problem), TritonTile.of(knobs), dtype, problem.epilogue, target)


ENGINE = PointwiseEngine()
