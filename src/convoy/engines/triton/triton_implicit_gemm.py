"""triton.implicit_gemm: convolution by gathered loads, for every stride, padding, dilation and group.

Purpose and limits: docs/kernels/triton.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from convoy.engines.base import Buffers, Engine, Executable, Packed
from convoy.engines.gpu.device_tensors import as_floats, checked, fits_tma, pitch_of, round_tf32, scratch, vector
from convoy.engines.gpu.gpu_support_checks import conv_support, is_strict
from convoy.engines.triton.igemm_swap_ab_launch import ReduceSplits
from convoy.engines.triton.triton_build import TORCH_DTYPE, KernelBuild, TritonKernel, interpreting, shared_limit
from convoy.engines.triton.triton_tile_search import candidate_tiles
from convoy.engines.triton.triton_tiles import ConvView, TritonTile, conv_view, estimate_us
from convoy.problem import ConvProblem, Epilogue, Knobs, Problem
from convoy.support import Support
from convoy.target import Target

_SIZES = ("pixels", "p", "q", "h", "width", "c", "k", "pitch", "c_group", "k_group", "c_blocks", "iterations", "iterations_split",
          "tiles_k", "pad_h", "pad_w", "dilation_h", "dilation_w")  # fmt: skip


def group_view(problem: ConvProblem, flat: bool) -> ConvView:
    """One group as a row of pixels; with `flat` its taps and channels are one axis."""
    view = conv_view(problem)
    c, k = problem.c // problem.groups, problem.k // problem.groups
    row = replace(view, n=1, p=1, q=view.pixels, k=k, c=c)
    return replace(row, c=c * problem.r * problem.s, r=1, s=1) if flat else row


def is_flat(problem: ConvProblem, knobs: Knobs) -> bool:
    """Whether the reduction is one axis: the knob `flat`."""
    del problem
    return bool(knobs["flat"])


class GatherExecutable(Executable):
    """One tile of the gather kernel for one problem."""

    def __init__(self, engine: str, problem: ConvProblem, knobs: Knobs, target: Target) -> None:
        self.problem, self.flat, self.tile = problem, is_flat(problem, knobs), tile_of(knobs)
        self.view = group_view(problem, self.flat)
        self.splits, self.each = self.tile.splits(self.view)
        self.vector_c, self.vector_k = vector(problem.c // problem.groups), vector(problem.k // problem.groups)
        self.workspace_bytes = split_bytes(problem, knobs)
        self.reduce: ReduceSplits | None = None
        if self.view.pixels == 0:
            return
        self.kernel = TritonKernel(self._build(engine, target), target)
        if self.splits > 1:
            elements = self.view.pixels * problem.k
            self.last_readers = {0: -2, 1: -1}  # x; the residual
            self.reduce = ReduceSplits(
                engine, elements, problem.k, self.splits, problem.y_dtype, problem.epilogue, target
            )

    def _build(self, engine: str, target: Target) -> KernelBuild:
        from convoy.engines.triton.kernels.gather_kernel import gather_conv  # pyright: ignore[reportUnknownVariableType]

        problem, tile, split = self.problem, self.tile, self.splits > 1
        dtype = problem.x_dtype
        fused = Epilogue() if split else problem.epilogue
        dependent = tile.pdl and target.capability >= 90 and not interpreting()
        signature = {
            "x": f"*{dtype}", "w": f"*{dtype}", "y": "*fp32" if split else f"*{dtype}",
            "residual": f"*{dtype}" if fused.residual else "none", "bias": f"*{dtype}" if fused.bias else "none",
        } | dict.fromkeys(_SIZES, "i32")  # fmt: skip
        constants: dict[str, Any] = {
            "R": problem.r, "S": problem.s, "STRIDE_H": problem.stride_h, "STRIDE_W": problem.stride_w,
            "BLOCK_K": tile.block_k, "BLOCK_P": tile.pixels, "BLOCK_C": tile.block_c, "FLAT": self.flat,
            "VECTOR_C": self.vector_c, "VECTOR_K": self.vector_k,
            "ACTIVATION": fused.activation, "PRECISION": "ieee" if is_strict(problem) else "tf32",
            "ROUND": dtype == "fp32" and not is_strict(problem), "SPLIT": split,
            "WAIT": dependent, "TRIGGER": (dependent or split) and target.capability >= 90 and not interpreting(),
        }  # fmt: skip
        divisible = ["x", "w", "y", "residual", "bias"]
        return KernelBuild(
            engine, gather_conv, signature, constants, divisible, tile.warps, tile.stages, dependent, tensor_cores=False
        )

    def accept_slice(self, result: int, pitch: int, offset: int) -> bool:
        """Where the slice keeps to the vectors that the kernel stores."""
        aligned = fits_tma(TORCH_DTYPE[self.problem.y_dtype], pitch, offset)
        if self.view.pixels == 0 or not aligned or pitch % self.vector_k:
            return False
        if self.reduce is not None:
            self.reduce.accept_pitch()
        return True

    def _sizes(self, pitch: int) -> list[int]:
        problem, view, tile = self.problem, self.view, self.tile
        return [
            view.pixels, problem.p, problem.q, problem.h, problem.w, problem.c // self.vector_c,
            problem.k // self.vector_k, pitch // self.vector_k, problem.c // problem.groups // self.vector_c,
            view.k // self.vector_k,
            tile.c_blocks(view), tile.iterations(view), self.each, -(-view.k // tile.block_k),
            problem.pad_h, problem.pad_w, problem.dilation_h, problem.dilation_w,
        ]  # fmt: skip

    def pack(self, constants: Sequence[torch.Tensor]) -> Packed:
        """The weight as [k, r, s, c / groups], rounded where TF32 would cut it; the bias as it is."""
        weight = constants[0] if is_strict(self.problem) else round_tf32(constants[0])
        return (weight.permute(0, 2, 3, 1).contiguous(), *(b.contiguous() for b in constants[1:]))

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        """One launch, or two where the reduction is split."""
        problem, view = self.problem, self.view
        if view.pixels == 0:
            return
        x, y, residual = checked(buffers, problem.epilogue.residual, slices=True)
        weight, bias = buffers.constants[0], buffers.constants[1] if problem.epilogue.bias else None
        grid = (math.prod(self.tile.tiles(view)), self.splits, problem.groups)
        partial = scratch(workspace, self.workspace_bytes)
        if partial is None or self.reduce is None:
            self.kernel(grid, [x, weight, y, residual, bias, *self._sizes(pitch_of(y))])
            return
        partial = as_floats(partial, self.splits * view.pixels * problem.k)
        self.kernel(grid, [x, weight, partial, None, None, *self._sizes(problem.k)])
        self.reduce.launch(partial, y, residual, bias)


def tile_of(knobs: Knobs) -> TritonTile:
    """The tile that this engine's knobs name: its pixels lie in one row."""
    return TritonTile(
        knobs.integer("block_k"), 1, 1, knobs.integer("block_p"), knobs.integer("block_c"),
        knobs.integer("stages"), knobs.integer("warps"), knobs.integer("split"), bool(knobs["pdl"]),
    )  # fmt: skip


def knobs_of(tile: TritonTile, flat: bool) -> Knobs:
    """Inverse of `tile_of`."""
    return Knobs.of(
        block_k=tile.block_k, block_p=tile.pixels, block_c=tile.block_c, stages=tile.stages, warps=tile.warps,
        split=tile.split, pdl=tile.pdl, flat=flat,
    )  # fmt: skip


def split_bytes(problem: ConvProblem, knobs: Knobs) -> int:
    """Bytes of the partial sums, over all groups."""
    splits, _ = tile_of(knobs).splits(group_view(problem, is_flat(problem, knobs)))
    return 4 * splits * problem.y_spec.elements if splits > 1 else 0


class TritonImplicitGemmEngine(Engine):
    """The implicit GEMM with gathered operands; see `kernels/gather.py`."""

    id = "triton.implicit_gemm"
    family = "implicit_gemm"
    devices = ("cuda",)
    writes_slices = True
    takes_all_nhwc = True
    trusted = False
    pure_space = True
    version = 2

    def supports(self, problem: Problem, target: Target) -> Support:
        """Every dense NHWC convolution, on capability 8.0 and newer."""
        return conv_support(problem, target, 80)

    def space(self, problem: Problem, target: Target) -> Sequence[Knobs]:
        """Tiles by rising estimated time; the reduction is one axis if a group has few channels."""
        assert isinstance(problem, ConvProblem)
        strict = is_strict(problem)
        c_group = problem.c // problem.groups
        width = 16 if strict else 64 // conv_view(problem).bytes_each
        # Where a block of channels would be half empty, taps and channels are one axis.
        flat = c_group < width and problem.r * problem.s > 1
        view = group_view(problem, flat)
        sizes = (16, 32) if strict else tuple(b for b in (width, 2 * width) if b == width or b <= view.c)
        ks = tuple(b for b in ((16, 32, 64) if strict else (16, 32, 64, 128)) if b == 16 or b < 2 * view.k)
        pixels = (16, 32, 64) if strict else (16, 32, 64, 128)
        tiles = candidate_tiles(
            view,
            block_cs=sizes,
            pixels=pixels,
            ks=ks,
            units=target.units,
            limit=60,
            shared=shared_limit(target),
            groups=problem.groups,
        )
        if strict:
            tiles = [t for t in tiles if t.block_k * t.pixels <= 64 * 64 and t.stages <= 3]
        elif c_group * problem.r * problem.s < 16:
            tiles = [t for t in tiles if t.block_c == width]
        tiles = [t for t in tiles if t.stages <= 4] or [TritonTile(16, 1, 1, 16, width, stages=2)]
        return [knobs_of(tile, flat) for tile in tiles[:20]]

    def workspace_bytes(self, problem: Problem, knobs: Knobs) -> int:
        """The partial sums of a split reduction."""
        assert isinstance(problem, ConvProblem)
        return split_bytes(problem, knobs)

    def estimate_us(self, problem: Problem, knobs: Knobs, target: Target) -> float:
        """The tiles' cost model; gathering (by 1078 rows of an H200) and, for exact fp32, plain multiply-adds cost more."""
        assert isinstance(problem, ConvProblem)
        view = group_view(problem, is_flat(problem, knobs))
        guess = estimate_us(view, tile_of(knobs), target.units, groups=problem.groups)
        return guess * 12.0 if is_strict(problem) else max(0.7 * guess, 1.1 * guess - 0.7)

    def build(self, problem: Problem, knobs: Knobs, target: Target) -> Executable:
        """Compile one tile."""
        assert isinstance(problem, ConvProblem)
        return GatherExecutable(self.id, problem, knobs, target)


ENGINE = TritonImplicitGemmEngine()
