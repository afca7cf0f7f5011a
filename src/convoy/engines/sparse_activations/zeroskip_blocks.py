"""zeroskip.blocks: an implicit GEMM on tensor cores that skips blocks of channels that are zero.

See docs/kernels/sparse-activations.md.

fp16, bf16, and fp32 if TF32 is allowed. A first pass lists, for every tile of output pixels, the blocks of `block_c` channels
that are not zero in the pixels that the tile reads; the second pass processes this list for every tap. For a dense input the
first pass is the whole overhead. Random zeros leave no block empty: the engine is for feature maps whose zeros are clustered.
"""

from __future__ import annotations

from collections.abc import Sequence

from convoy.engines.base import Engine, Executable
from convoy.engines.gpu.gpu_support_checks import is_strict
from convoy.engines.sparse_activations.zeroskip_tiles import TileExecutable, layout, tile_space, tile_support
from convoy.problem import ConvProblem, Knobs, Problem
from convoy.support import Support
from convoy.target import Target


class ZeroskipBlocksEngine(Engine):
    """Half types, and TF32."""

    id = "zeroskip.blocks"
    family = "implicit_gemm"
    devices = ("cuda",)
    offered_by_default = False
    trusted = False
    skips_zeros = True
    zeros_kind = "dead_blocks"

    def supports(self, problem: Problem, target: Target) -> Support:
        """NHWC, no groups, any pooling, no strict fp32, capability 8.0 and newer."""
        found = tile_support(problem, target, ("fp16", "bf16", "fp32"))
        if found and isinstance(problem, ConvProblem) and is_strict(problem):
            return Support.no("multiplies in TF32, got fp32 under numerics strict")
        return found

    def space(self, problem: Problem, target: Target) -> Sequence[Knobs]:
        """Tiles, by blocks of channels."""
        assert isinstance(problem, ConvProblem)
        return tile_space(problem, target.units, precisions=("tf32",), block_cs=(32, 64))

    def workspace_bytes(self, problem: Problem, knobs: Knobs) -> int:
        """Lists, memory for windows, parts."""
        assert isinstance(problem, ConvProblem)
        return layout(problem, knobs, knobs.integer("block_c")).size_bytes

    def build(self, problem: Problem, knobs: Knobs, target: Target) -> Executable:
        """Compile both passes."""
        assert isinstance(problem, ConvProblem)
        return TileExecutable(self.id, problem, knobs, target, knobs.integer("block_c"))


ENGINE = ZeroskipBlocksEngine()
