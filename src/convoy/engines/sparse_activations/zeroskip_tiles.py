"""Shared by the engines of the tile kernels (kernels/zeroskip_tile_kernels.py): tiling, executable, search space."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import torch

from convoy.engines.base import Buffers, Executable, Packed
from convoy.engines.gpu.device_tensors import checked, round_tf32, vector
from convoy.engines.gpu.gpu_support_checks import conv_support, is_strict
from convoy.engines.scratch import Scratch
from convoy.engines.sparse_activations.zeroskip_tile_geometry import TileGeometry, power_of_two
from convoy.engines.triton.igemm_swap_ab_launch import ReduceSplits
from convoy.engines.triton.triton_build import KernelBuild, TritonKernel
from convoy.errors import LaunchError
from convoy.problem import ConvProblem, Epilogue, Knobs, Pool, Problem
from convoy.support import Support
from convoy.target import Target

LOOK_C: Final = 512
"""Channels, at most, that the first pass looks at together."""

LOOK_VALUES: Final = 1 << 14
"""Values that it has on their way at once: its loop is as long as its loads take, so a patch is read in few steps."""

LOOK_WARPS: Final = 16

DENSE_SHARE: Final = 0.875
"""Share of live channels from which a tile reads its channels as they lie: gathering one by one costs more than an eighth."""

_SIZES = (
    "p",
    "q",
    "h",
    "width",
    "c",
    "k",
    "y_h",
    "y_w",
    "tiles_h",
    "tiles_w",
    "tiles_k",
    "dense_from",
    "pad_h",
    "pad_w",
)
_LOOK_SIZES = ("h", "width", "c", "tiles_h", "tiles_w", "step_h", "step_w", "first_h", "first_w", "patch_h", "patch_w",
               "all_live")  # fmt: skip
_ONE: Final = Pool("max", 1, 1, 1, 1)


def tile_support(problem: Problem, target: Target, dtypes: Sequence[str]) -> Support:
    """Support checks of every tile engine: dense NHWC, no groups, one of `dtypes`, with or without pooling."""
    if isinstance(problem, ConvProblem) and problem.epilogue.pool is not None:
        plain = replace(problem, epilogue=replace(problem.epilogue, pool=None))
    else:
        plain = problem
    found = conv_support(plain, target, 80)
    if not found or not isinstance(problem, ConvProblem):
        return found
    if problem.groups != 1:
        return Support.no(f"needs groups = 1, got {problem.groups}")
    if problem.x_dtype not in dtypes:
        return Support.no(f"needs {' or '.join(dtypes)}, got {problem.x_dtype}")
    if problem.n == 0:
        return Support.no("needs a batch of at least 1, got 0")
    return Support.yes()


class TileExecutable(Executable):
    """A first pass that finds live channels; the tiles; the sum of the parts of a split reduction."""

    def __init__(self, engine: str, problem: ConvProblem, knobs: Knobs, target: Target, granule: int) -> None:
        self.problem, self.granule = problem, granule
        self.geometry = TileGeometry.of(problem, knobs)
        self.block_k, self.block_c = knobs.integer("block_k"), knobs.integer("block_c")
        self.splits = knobs.integer("split") if self.geometry.way == "none" else 1
        self.vector_c, self.vector_k = vector(problem.c), vector(problem.k)
        self.tiles_h, self.tiles_w = self.geometry.tiles(problem)
        self.tiles_k = -(-problem.k // self.block_k)
        self._layout = layout(problem, knobs, granule)
        self.workspace_bytes = self._layout.size_bytes
        precision = str(knobs["precision"]) if is_strict(problem) else "tf32"
        self.look = TritonKernel(self._look_build(engine), target)
        self.kernel = TritonKernel(
            self._build(engine, precision, knobs.integer("warps"), knobs.integer("stages")), target
        )
        self.reduce: ReduceSplits | None = None
        if self.splits > 1:
            elements, epilogue = problem.conv_spec.elements, problem.epilogue
            self.reduce = ReduceSplits(engine, elements, problem.k, self.splits, problem.y_dtype, epilogue, target)

    def _look_build(self, engine: str) -> KernelBuild:
        from convoy.engines.sparse_activations.kernels.zeroskip_tile_kernels import find_live  # pyright: ignore[reportUnknownVariableType]

        signature = {"x": f"*{self.problem.x_dtype}", "live": "*i32", "counts": "*i32"} | dict.fromkeys(
            _LOOK_SIZES, "i32"
        )
        patch_h, patch_w = self._patch()
        block_c = max(self.granule, min(LOOK_C, power_of_two(self.problem.c)))
        block_x = min(power_of_two(patch_h * patch_w), LOOK_VALUES // block_c)
        constants: dict[str, Any] = {
            "GRANULE": self.granule, "BLOCK_C": block_c, "BLOCK_X": block_x, "VECTOR_C": self.vector_c,
        }  # fmt: skip
        pointers = ["x", "live", "counts"]
        return KernelBuild(engine, find_live, signature, constants, pointers, LOOK_WARPS, 1, tensor_cores=False)

    def _build(self, engine: str, precision: str, warps: int, stages: int) -> KernelBuild:
        from convoy.engines.sparse_activations.kernels.zeroskip_tile_kernels import tile_conv  # pyright: ignore[reportUnknownVariableType]

        problem, geometry, dtype = self.problem, self.geometry, self.problem.x_dtype
        split = self.splits > 1
        fused = Epilogue() if split else problem.epilogue
        pool = problem.epilogue.pool or _ONE
        signature = {
            "x": f"*{dtype}", "w": f"*{dtype}", "y": "*fp32" if split else f"*{dtype}",
            "residual": f"*{dtype}" if fused.residual else "none", "bias": f"*{dtype}" if fused.bias else "none",
            "live": "*i32", "counts": "*i32",
            "scratch": "*fp32" if geometry.way == "windows" else "none",
        } | dict.fromkeys(_SIZES, "i32")  # fmt: skip
        constants: dict[str, Any] = {
            "R": problem.r, "S": problem.s, "STRIDE_H": problem.stride_h, "STRIDE_W": problem.stride_w,
            "DILATION_H": problem.dilation_h, "DILATION_W": problem.dilation_w, "RESULT_H": geometry.result_h,
            "RESULT_W": geometry.result_w, "REGION_W": geometry.pitch, "BLOCK_P": geometry.block_p,
            "BLOCK_R": geometry.block_r, "BLOCK_K": self.block_k, "BLOCK_C": self.block_c, "GRANULE": self.granule,
            "POOL": geometry.way, "AVERAGE": pool.kind == "avg", "COUNT_PAD": pool.count_include_pad,
            "WINDOW_H": pool.window_h, "WINDOW_W": pool.window_w, "POOL_STRIDE_H": pool.stride_h,
            "POOL_STRIDE_W": pool.stride_w, "POOL_PAD_H": pool.pad_h, "POOL_PAD_W": pool.pad_w,
            "VECTOR_C": self.vector_c, "VECTOR_K": self.vector_k, "PRECISION": precision,
            "CHUNKED": precision == "tf32x3", "ACTIVATION": fused.activation, "SPLITS": self.splits,
        }  # fmt: skip
        pointers = ["x", "w", "y", "residual", "bias", "live", "counts", "scratch"]
        return KernelBuild(engine, tile_conv, signature, constants, pointers, warps, stages, tensor_cores=False)

    def pack(self, constants: Sequence[torch.Tensor]) -> Packed:
        """The weight as [r, s, c, k], rounded where TF32 would cut it; the bias; whether all weights are finite."""
        weight = constants[0].detach() if is_strict(self.problem) else round_tf32(constants[0].detach())
        finite = bool(torch.isfinite(weight).all())
        return weight.permute(2, 3, 1, 0).contiguous(), *(b.contiguous() for b in constants[1:]), finite

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        """Up to three launches."""
        problem, epilogue = self.problem, self.problem.epilogue
        x, y, residual = checked(buffers, epilogue.residual)
        if self.workspace_bytes and (workspace is None or workspace.numel() < self.workspace_bytes):
            raise LaunchError(f"workspace: expected at least {self.workspace_bytes} bytes")
        live, counts, memory, partial = self._pieces(workspace)
        weight, finite = buffers.constants[0], buffers.constants[-1]
        bias = buffers.constants[1] if epilogue.bias else None
        tiles = problem.n * self.tiles_h * self.tiles_w
        self.look((tiles, 1, 1), [x, live, counts, *self._look_sizes(), int(not finite)])
        grid = (tiles * self.tiles_k, self.splits, 1)
        if self.reduce is None:
            self.kernel(grid, [x, weight, y, residual, bias, live, counts, memory, *self._sizes()])
            return
        assert partial is not None
        self.kernel(grid, [x, weight, partial, None, None, live, counts, memory, *self._sizes()])
        self.reduce.launch(partial, y, residual, bias)

    def _pieces(self, workspace: torch.Tensor | None) -> list[torch.Tensor | None]:
        """live, counts, the tiles' own memory and the parts of a split sum; None for what there is none of."""
        views = iter(self._layout.views(workspace))
        wanted = (True, True, self.geometry.way == "windows", self.splits > 1)
        return [next(views) if there else None for there in wanted]

    def _sizes(self) -> list[int]:
        problem = self.problem
        _, _, y_h, y_w = problem.y_spec.shape
        return [
            problem.p, problem.q, problem.h, problem.w, problem.c // self.vector_c, problem.k // self.vector_k, y_h, y_w,
            self.tiles_h, self.tiles_w, self.tiles_k, math.ceil(DENSE_SHARE * problem.c), problem.pad_h, problem.pad_w,
        ]  # fmt: skip

    def _patch(self) -> tuple[int, int]:
        """Height and width of the part of x that a tile reads."""
        problem, geometry = self.problem, self.geometry
        height = (geometry.region_h - 1) * problem.stride_h + (problem.r - 1) * problem.dilation_h + 1
        return height, (geometry.region_w - 1) * problem.stride_w + (problem.s - 1) * problem.dilation_w + 1

    def _look_sizes(self) -> list[int]:
        """Where the patch of a tile lies: the pixels of x that its part of the convolution reads."""
        problem, geometry, pool = self.problem, self.geometry, self.problem.epilogue.pool or _ONE
        step_h = geometry.result_h * pool.stride_h * problem.stride_h
        step_w = geometry.result_w * pool.stride_w * problem.stride_w
        first_h = -pool.pad_h * problem.stride_h - problem.pad_h
        first_w = -pool.pad_w * problem.stride_w - problem.pad_w
        return [
            problem.h, problem.w, problem.c // self.vector_c, self.tiles_h, self.tiles_w, step_h, step_w, first_h, first_w,
            *self._patch(),
        ]  # fmt: skip


def layout(problem: ConvProblem, knobs: Knobs, granule: int) -> Scratch:
    """The workspace: lists and counts of live channels, memory for windows, parts of a split sum."""
    geometry, found = TileGeometry.of(problem, knobs), Scratch()
    tiles = problem.n * math.prod(geometry.tiles(problem))
    found.add((tiles, -(-problem.c // granule)), torch.int32)
    found.add((tiles,), torch.int32)
    if geometry.way == "windows":
        found.add(
            (tiles, -(-problem.k // knobs.integer("block_k")), geometry.block_p, knobs.integer("block_k")),
            torch.float32,
        )
    if geometry.way == "none" and knobs.integer("split") > 1:
        found.add((knobs.integer("split"), problem.conv_spec.elements), torch.float32)
    return found


def tile_space(problem: ConvProblem, units: int, *, precisions: Sequence[str], block_cs: Sequence[int]) -> list[Knobs]:
    """Tiles that may win: as many thread blocks as the device has places for come first, then the larger tiles."""
    found: list[tuple[float, Knobs]] = []
    strict = is_strict(problem)
    for tile_h, tile_w in ((4, 4), (4, 8), (8, 8), (8, 16)):
        for block_k in (32, 64, 128):
            if (block_k > 32 and block_k >= 2 * problem.k) or (strict and tile_h * tile_w * block_k > 64 * 64):
                continue
            for block_c in block_cs:
                for split in (1, 2, 4, 8) if problem.epilogue.pool is None else (1,):
                    for precision in precisions:
                        knobs = Knobs.of(
                            tile_h=tile_h, tile_w=tile_w, block_k=block_k, block_c=block_c, split=split, stages=3,
                            warps=8 if tile_h * tile_w * block_k >= 8192 else 4, precision=precision,
                        )  # fmt: skip
                        if split == 1 or -(-problem.c // block_c) >= 2 * split:
                            found.append((_guess(problem, knobs, units), knobs))
    found.sort(key=lambda pair: pair[0])
    return [knobs for _, knobs in found[:24]]


def _guess(problem: ConvProblem, knobs: Knobs, units: int) -> float:
    """An order, not a time: waves of thread blocks, each as long as its products and loads."""
    geometry = TileGeometry.of(problem, knobs)
    block_k, split = knobs.integer("block_k"), knobs.integer("split")
    blocks = problem.n * math.prod(geometry.tiles(problem)) * -(-problem.k // block_k) * split
    waves = max(1.0, blocks / (2 * max(units, 1)))
    work = geometry.block_p * block_k + 24 * (geometry.block_p + block_k)
    return waves * problem.reduction_length / split * work * (1 + 0.02 * (split > 1))
