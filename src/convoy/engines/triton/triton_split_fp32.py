"""triton.split_fp32: strict fp32 convolution on tensor cores by products of split operands (docs/kernels/strict-fp32.md)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from convoy.engines.base import Buffers, Engine, Executable, Packed
from convoy.engines.gpu.device_tensors import checked, scratch
from convoy.engines.gpu.gpu_support_checks import conv_support
from convoy.engines.triton.igemm_swap_ab_launch import box_type, pack_bias, pack_tiles
from convoy.engines.triton.marking_executables import UNMARKED, MarkingExecutable
from convoy.engines.triton.split_planes import PlaneSplit, plane_bytes, split_us, split_weight
from convoy.engines.triton.triton_build import KernelBuild, interpreting, shared_limit
from convoy.engines.triton.triton_igemm_swap_ab import tensor_support
from convoy.engines.triton.triton_tile_search import candidate_tiles
from convoy.engines.triton.triton_tiles import ConvView, TritonTile, conv_view, estimate_us, row_view
from convoy.problem import ConvProblem, Knobs, Problem, TensorSpec
from convoy.support import Support
from convoy.target import Target

_NOT_HERE = ("PRECISION", "DTYPE", "TRIGGER", "PREFETCH_BYTES", "WARPS")
"""Constants of the swap-AB kernel that the split one does not have."""


def plane_view(problem: ConvProblem) -> ConvView:
    """The problem on fp16 planes; a 1x1 convolution of stride 1 as one row of pixels."""
    view = (
        row_view(problem) if problem.is_pointwise and problem.stride_h * problem.stride_w == 1 else conv_view(problem)
    )
    return replace(view, bytes_each=2)


class TritonSplitFp32Executable(MarkingExecutable):
    """Three launches (largest |x|, split, product), a fourth where the reduction is split; two or three where x has marks."""

    def __init__(
        self, engine: str, problem: ConvProblem, tile: TritonTile, target: Target, view: ConvView | None = None
    ) -> None:
        self.elements, self.target = problem.x_spec.elements, target
        super().__init__(engine, view or plane_view(problem), tile, "fp32", problem.epilogue, target)
        self.partial_bytes = self.workspace_bytes
        self.workspace_bytes = plane_bytes(problem.x_spec.elements) + self.partial_bytes
        if self.view.pixels == 0:
            self.workspace_bytes = 0
            return
        self.x = PlaneSplit(engine, self.elements, target)

    def _build(self, engine: str, dtype: str) -> KernelBuild:
        from convoy.engines.triton.kernels.split_fp32_kernels import split_conv  # pyright: ignore[reportUnknownVariableType]

        build = super()._build(engine, dtype)
        tile, dependent = self.tile, not interpreting()
        constants = {n: v for n, v in build.constants.items() if n not in _NOT_HERE}
        sizes = {n: t for n, t in build.signature.items() if t == "i32"}
        signature = {
            "x": box_type("fp16", self.x_box), "w": box_type("fp16", [tile.block_k, tile.block_c]),
            **{name: build.signature[name] for name in ("y", "residual", "bias")},
            "x_inverse": "*fp32", "w_inverse": "*fp32", **sizes,
        }  # fmt: skip
        constants |= {"WAIT": dependent, "BODY_FIRST": tile.warps == 4, **UNMARKED}
        return KernelBuild(
            engine, split_conv, signature, constants, ["bias", "x_inverse", "w_inverse"],
            tile.warps, tile.stages, dependent,
        )  # fmt: skip

    def pack(self, constants: Sequence[torch.Tensor]) -> Packed:
        """Both planes of the weight in tile order; the bias and 1 / s padded to whole tiles."""
        high, low, inverse = split_weight(constants[0])
        planes = torch.cat((pack_tiles(high, self.tile), pack_tiles(low, self.tile)))
        rows = [pack_bias(values, self.tile.block_k) for values in (*constants[1:], inverse)]
        return (planes, *rows)

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        """Split x, multiply, and add the parts."""
        view = self.view
        if view.pixels == 0:
            return
        x, _, _ = checked(buffers, self.epilogue.residual, slices=True)
        room = scratch(workspace, self.workspace_bytes)
        assert room is not None
        marks = buffers.args[-1] if len(buffers.args) > 1 + self.epilogue.residual else None
        planes, inverse = self.x.split(x, marks, buffers.constants[0], room)
        partial = room[self.workspace_bytes - self.partial_bytes :] if self.partial_bytes else None
        self.multiply(planes, buffers, partial, (inverse, buffers.constants[-1]))

    def accept_marks(self, spec: TensorSpec) -> bool:
        """See `PlaneSplit`."""
        return self.view.pixels > 0 and self.x.accept_marks(spec)

    def x_images(self) -> int:
        """Two planes of every image."""
        return 2 * self.view.n


class TritonSplitFp32Engine(Engine):
    """fp16x3 with short sums; see `kernels/split.py`."""

    id = "triton.split_fp32"
    family = "implicit_gemm"
    devices = ("cuda",)
    writes_slices = True
    only_numerics = ("strict",)
    trusted = False

    def supports(self, problem: Problem, target: Target) -> Support:
        """fp32 NHWC convolutions on Hopper, c and k multiples of 8."""
        if not (found := conv_support(problem, target, 90)):
            return found
        assert isinstance(problem, ConvProblem)
        if problem.x_dtype != "fp32":
            return Support.no(f"splits fp32, got {problem.x_dtype}")
        if problem.groups != 1:
            return Support.no(f"needs groups = 1, got {problem.groups}")
        return tensor_support(plane_view(problem))

    def space(self, problem: Problem, target: Target) -> Sequence[Knobs]:
        """Tiles by rising estimated time; an iteration sums at most 128 channels before its sum is added in fp32."""
        assert isinstance(problem, ConvProblem)
        view = plane_view(problem)
        sizes = tuple(b for b in (128, 64, 32) if b < 2 * view.c or b == 32)
        if view.strided:
            sizes = tuple(b for b in (128, 64, 32, 16) if view.c % b == 0)
        tiles = candidate_tiles(
            view,
            block_cs=sizes,
            pixels=(32, 64, 128),
            ks=(64, 128),
            units=target.units,
            planes=3,
            limit=40,
            shared=shared_limit(target),
        )
        whole = [t for t in tiles if view.n % t.block_n == 0]
        return [tile.knobs for tile in (whole or [TritonTile(64, 1, 8, 8, sizes[-1], 3)])[:24]]

    def workspace_bytes(self, problem: Problem, knobs: Knobs) -> int:
        """Planes of x, and the partial sums of a split reduction."""
        assert isinstance(problem, ConvProblem)
        view, tile = plane_view(problem), TritonTile.of(knobs)
        if view.pixels == 0:
            return 0
        splits, _ = tile.splits(view)
        return plane_bytes(problem.x_spec.elements) + (4 * splits * view.pixels * view.k if splits > 1 else 0)

    def estimate_us(self, problem: Problem, knobs: Knobs, target: Target) -> float:
        """The tiles' cost model and the two launches that split x."""
        assert isinstance(problem, ConvProblem)
        guess = estimate_us(plane_view(problem), TritonTile.of(knobs), target.units, planes=3)
        return guess + split_us(problem.x_spec.elements)

    def build(self, problem: Problem, knobs: Knobs, target: Target) -> Executable:
        """Compile one tile."""
        assert isinstance(problem, ConvProblem)
        return TritonSplitFp32Executable(self.id, problem, TritonTile.of(knobs), target)


ENGINE = TritonSplitFp32Engine()
