"""zeroskip.gather: strict fp32 over the channels that are alive in a tile of pixels (docs/kernels/sparse-activations.md).

A first pass lists, for every tile of output pixels, the channels that hold anything but zeros in the pixels that the tile
reads. The second multiplies over these alone: values and weight rows are gathered by the list, by plain fp32 multiply-adds
(`ieee`) or by three TF32 products on tensor cores (`tf32x3`), whose sums are kept short. A split of the sum divides the list,
so its parts are even. A tile in which nearly all channels are alive reads them as they lie.
"""

from __future__ import annotations

from collections.abc import Sequence

from convoy.engines.base import Engine, Executable
from convoy.engines.gpu.gpu_support_checks import is_strict
from convoy.engines.sparse_activations.zeroskip_tiles import TileExecutable, layout, tile_space, tile_support
from convoy.problem import ConvProblem, Knobs, Problem
from convoy.support import Support
from convoy.target import Target

_LOOK_US, _FLOPS_US = 8.0, 3.6e7


class GatherEngine(Engine):
    """fp32 under numerics `strict`."""

    id = "zeroskip.gather"
    family = "implicit_gemm"
    devices = ("cuda",)
    offered_by_default = False
    trusted = False
    skips_zeros = True
    zeros_kind = "dead_tiles"

    def supports(self, problem: Problem, target: Target) -> Support:
        """Strict fp32, NHWC, no groups, any pooling, capability 8.0 and newer."""
        found = tile_support(problem, target, ("fp32",))
        if found and isinstance(problem, ConvProblem) and not is_strict(problem):
            return Support.no(f"needs numerics strict, got {problem.numerics}")
        return found

    def space(self, problem: Problem, target: Target) -> Sequence[Knobs]:
        """Tiles; split products where the sum over one block of channels is short enough for them to be exact."""
        assert isinstance(problem, ConvProblem)
        precisions = ("ieee", "tf32x3") if problem.r * problem.s > 1 else ("ieee",)
        return tile_space(problem, target.units, precisions=precisions, block_cs=(16, 32))

    def workspace_bytes(self, problem: Problem, knobs: Knobs) -> int:
        """Lists, memory for windows, parts."""
        assert isinstance(problem, ConvProblem)
        return layout(problem, knobs, 1).size_bytes

    def estimate_us(self, problem: Problem, knobs: Knobs, target: Target) -> float:
        """The first pass and all products, as for zeros in random places; channels fill whole blocks.

        Fitted to VGG-19's layers on an H100, whose times do not depend on the share of zeros: within a fifth.
        """
        del target
        assert isinstance(problem, ConvProblem)
        block_c = knobs.integer("block_c")
        filled = -(-problem.c // block_c) * block_c / problem.c
        return _LOOK_US + problem.flops * filled / _FLOPS_US

    def build(self, problem: Problem, knobs: Knobs, target: Target) -> Executable:
        """Compile both passes."""
        assert isinstance(problem, ConvProblem)
        return TileExecutable(self.id, problem, knobs, target, 1)


ENGINE = GatherEngine()
