"""triton.conv3d: three-dimensional convolutions of channels_last_3d volumes (docs/kernels/triton.md)."""

from __future__ import annotations

from collections.abc import Sequence

from convoy.engines.base import Engine, Executable
from convoy.engines.gpu.gpu_support_checks import conv3d_support, is_strict
from convoy.engines.triton.triton_build import shared_limit
from convoy.engines.triton.volumes.conv3d_cost import estimate_us
from convoy.engines.triton.volumes.conv3d_launch import BoxExecutable, GatherVolumeExecutable
from convoy.engines.triton.volumes.conv3d_space import candidate_tiles
from convoy.engines.triton.volumes.conv3d_tile import VolumeTile, block_channels, strided_planes
from convoy.problem import Conv3dProblem, Knobs, Problem
from convoy.problem.spec import DTYPE_BYTES
from convoy.support import Support
from convoy.target import Target


def boxes_support(problem: Conv3dProblem, target: Target) -> Support:
    """Whether TMA can read x and write y."""
    vector = 16 // DTYPE_BYTES[problem.dtype]
    if target.capability < 90 or is_strict(problem):
        return Support.no("needs capability 9.0 and products on tensor cores")
    if problem.c % vector or problem.k % vector:
        return Support.no(f"needs c and k as multiples of {vector}, got {problem.c} and {problem.k}")
    if strided_planes(problem):
        _, h, w = problem.size
        _, stride_h, stride_w = problem.stride
        if h % stride_h or w % stride_w or max(stride_h, stride_w) > 4 or not block_channels(problem):
            return Support.no("needs h and w as multiples of a stride of at most 4, and c as a multiple of 16")
    return Support.yes()


class TritonConv3dEngine(Engine):
    """The implicit GEMM in three dimensions; see `kernels/volume_kernels.py`."""

    id = "triton.conv3d"
    family = "implicit_gemm"
    devices = ("cuda",)
    trusted = False
    pure_space = True

    def supports(self, problem: Problem, target: Target) -> Support:
        """Dense ndhwc convolutions forward, on capability 8.0 and newer."""
        return conv3d_support(problem, target, 80)

    def space(self, problem: Problem, target: Target) -> Sequence[Knobs]:
        """Tiles by rising estimated time."""
        assert isinstance(problem, Conv3dProblem)
        boxes = bool(boxes_support(problem, target))
        tiles = candidate_tiles(problem, target.units, shared_limit(target), boxes=boxes, strict=is_strict(problem))
        return [tile.knobs for tile in tiles]

    def workspace_bytes(self, problem: Problem, knobs: Knobs) -> int:
        """The partial sums of a split reduction."""
        assert isinstance(problem, Conv3dProblem)
        return VolumeTile.of(knobs).split_bytes(problem)

    def estimate_us(self, problem: Problem, knobs: Knobs, target: Target) -> float:
        """The tiles' cost model."""
        assert isinstance(problem, Conv3dProblem)
        tile = VolumeTile.of(knobs)
        return estimate_us(problem, tile, target.units, shared_limit(target), strict=is_strict(problem))

    def build(self, problem: Problem, knobs: Knobs, target: Target) -> Executable:
        """Compile one tile."""
        assert isinstance(problem, Conv3dProblem)
        tile = VolumeTile.of(knobs)
        kind = GatherVolumeExecutable if tile.gather else BoxExecutable
        return kind(self.id, problem, tile, target)


ENGINE = TritonConv3dEngine()
