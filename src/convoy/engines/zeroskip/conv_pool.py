"""zeroskip.conv_pool: a dense convolution with its epilogue and the pooling behind it in one kernel (docs/kernels/zeroskip.md).

2x2 windows of stride 2 are reduced in registers: four neighbouring rows of the product are a window. Any other window is
read back from memory of the thread block's own, through the first-level cache; where windows overlap, tiles overlap by as
much, and what lies there is computed twice.
"""

from __future__ import annotations

from collections.abc import Sequence

from convoy.engines.base import Engine, Executable
from convoy.engines.triton.requirements import is_strict
from convoy.engines.zeroskip.tiles import TileExecutable, layout, tile_space, tile_support
from convoy.problem import ConvProblem, Knobs, Problem
from convoy.support import Support
from convoy.target import Target

LARGEST_WINDOW = 8
"""Rows or columns: a tile is at least as large as a window."""


class ConvPoolEngine(Engine):
    """fp32, TF32, fp16 and bf16."""

    id = "zeroskip.conv_pool"
    family = "implicit_gemm"
    trusted = False

    def supports(self, problem: Problem, target: Target) -> Support:
        """NHWC, no groups, a pooling whose window is at most 8 x 8, capability 8.0 and newer."""
        found = tile_support(problem, target, ("fp16", "bf16", "fp32"))
        if not found or not isinstance(problem, ConvProblem):
            return found
        pool = problem.epilogue.pool
        if pool is None:
            return Support.no("is for convolutions with a pooling, got none")
        if max(pool.window_h, pool.window_w) > LARGEST_WINDOW:
            return Support.no(f"needs windows of at most {LARGEST_WINDOW}, got {pool.window_h}x{pool.window_w}")
        return found

    def space(self, problem: Problem, target: Target) -> Sequence[Knobs]:
        """Tiles, by blocks of channels."""
        assert isinstance(problem, ConvProblem)
        strict = is_strict(problem)
        precisions = ("ieee",) if problem.r * problem.s == 1 else ("ieee", "tf32x3")
        sizes = (16, 32) if strict else (32, 64)
        return tile_space(problem, target.units, precisions=precisions if strict else ("tf32",), block_cs=sizes)

    def workspace_bytes(self, problem: Problem, knobs: Knobs) -> int:
        """Memory for windows."""
        assert isinstance(problem, ConvProblem)
        return layout(problem, knobs, 0).size_bytes

    def build(self, problem: Problem, knobs: Knobs, target: Target) -> Executable:
        """Compile one tile."""
        assert isinstance(problem, ConvProblem)
        return TileExecutable(self.id, problem, knobs, target, 0)


ENGINE = ConvPoolEngine()
