"""triton.persistent: convolutions over many pixels, by thread blocks that stay and take tile after tile (see docs/kernels)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from convoy.engines.base import Buffers, Executable
from convoy.engines.gpu.device_tensors import checked, descriptor
from convoy.engines.gpu.gpu_support_checks import product_support
from convoy.engines.tiled_kernel import TiledKernelEngine
from convoy.engines.triton.igemm_swap_ab_launch import TritonSwapABExecutable, box_type
from convoy.engines.triton.triton_build import KernelBuild, interpreting, shared_limit
from convoy.engines.triton.triton_igemm_swap_ab import block_channels, tensor_support
from convoy.engines.triton.triton_tile_search import boxes
from convoy.engines.triton.triton_tiles import ConvView, TritonTile, conv_view, row_view
from convoy.problem import ConvProblem, Epilogue, Knobs, Problem
from convoy.support import Support
from convoy.target import Target

_SIZES = ("tiles", "tiles_k", "tiles_h", "tiles_w", "c_blocks", "iterations", "channels", "pad_h", "pad_w",
          "dilation_h", "dilation_w")  # fmt: skip
_SHARED_BYTES = 232448
_REGISTERS = 65536
_FLOPS_NS_PER_SM = {2: 4096 * 1.6, 4: 2048 * 1.6}
"""Half and TF32 operations per nanosecond of one multiprocessor at 1.6 GHz, which an H100 sustains under such a load."""

_LOAD_BYTES_NS_PER_SM = 56.0
"""7.4 TB/s from L2 over 132 multiprocessors (measured)."""

_MEMORY_BYTES_NS = 2900.0
_START_NS = 2500.0
"""Launch, first loads and last store."""


@dataclass(frozen=True, slots=True)
class PersistentTile:
    """A tile with how blocks work through it: `parts` of the store, `blocks` a multiprocessor, whose operand comes first."""

    tile: TritonTile
    parts: int
    blocks: int
    swapped: bool

    @property
    def knobs(self) -> Knobs:
        """As an engine's knobs."""
        tile = self.tile
        return Knobs.of(
            block_k=tile.block_k, block_n=tile.block_n, block_h=tile.block_h, block_w=tile.block_w,
            block_c=tile.block_c, stages=tile.stages, warps=tile.warps, pdl=tile.pdl,
            parts=self.parts, blocks=self.blocks, swapped=self.swapped,
        )  # fmt: skip

    @staticmethod
    def of(knobs: Knobs) -> PersistentTile:
        """Inverse of `knobs`."""
        sizes = ("block_k", "block_n", "block_h", "block_w", "block_c", "stages", "warps")
        tile = TritonTile(*(knobs.integer(name) for name in sizes), pdl=bool(knobs["pdl"]))
        return PersistentTile(tile, knobs.integer("parts"), knobs.integer("blocks"), bool(knobs["swapped"]))

    def shared_bytes(self, view: ConvView, residual: bool) -> int:
        """Shared memory that a block will want: the ring of loads, and one part of the result and of the residual."""
        return self.tile.stages * _stage_bytes(view, self.tile) + _result_bytes(view, self.tile, self.parts, residual)


def _stage_bytes(view: ConvView, tile: TritonTile) -> int:
    """Of the ring of loads."""
    return (tile.block_k + tile.pixels) * tile.block_c * view.bytes_each


def _result_bytes(view: ConvView, tile: TritonTile, parts: int, residual: bool) -> int:
    """Of one part of the result and of the residual, and some more."""
    return tile.block_k * tile.pixels * view.bytes_each // parts * (2 if residual else 1) + 1024


def view_of(problem: ConvProblem) -> ConvView:
    """A 1x1 convolution of stride 1 is one row of pixels; others keep their images."""
    plain = problem.is_pointwise and problem.stride_h == problem.stride_w == 1
    return row_view(problem) if plain else conv_view(problem)


def estimate_us(view: ConvView, config: PersistentTile, units: int) -> float:
    """Estimated microseconds: the busiest multiprocessor's products or loads, or the memory's bytes."""
    tile = config.tile
    tiles = math.prod(tile.tiles(view))
    resident = min(config.blocks, tiles)
    rounds = -(-tiles // (units * resident)) * resident
    iteration = 2 * tile.block_k * tile.pixels * tile.block_c
    loads = (tile.block_k + tile.pixels) * tile.block_c * view.bytes_each / _LOAD_BYTES_NS_PER_SM
    step = max(iteration / _FLOPS_NS_PER_SM[view.bytes_each], loads)
    # One block a multiprocessor stores while its next tile loads, but does not multiply then: half of the store is seen.
    store = tile.block_k * tile.pixels * view.bytes_each / _LOAD_BYTES_NS_PER_SM / (2 * config.blocks)
    busy = rounds * (tile.iterations(view) * step + store)
    moved = view.n * view.h * view.w * view.c + view.pixels * view.k + view.k * view.c * view.r * view.s
    return (max(busy, moved * view.bytes_each / _MEMORY_BYTES_NS) + _START_NS) / 1000


def tile_configs(
    view: ConvView, units: int, residual: bool, limit: int = 24, shared: int = _SHARED_BYTES
) -> list[PersistentTile]:
    """Tile configurations worth trying, by rising estimated time, in `shared` bytes of shared memory."""
    found: list[tuple[float, int, PersistentTile]] = []
    row = view.is_1x1 and view.n == view.p == 1
    for swapped in (False, True) if row else (True,):
        for block_k in (64, 128, 256):
            if block_k > 64 and block_k >= 2 * view.k:
                continue
            for box in boxes(view, (64, 128, 256)):
                for block_c in block_channels(view)[:2]:
                    tile = TritonTile(block_k, *box, block_c, pdl=True)
                    for config in _staged(view, tile, swapped, residual, shared):
                        found.append((estimate_us(view, config, units), len(found), config))
    found.sort(key=lambda entry: entry[:2])
    kept: dict[tuple[object, ...], int] = {}
    chosen: list[PersistentTile] = []
    for _, _, config in found:
        shape = (config.tile.block_k, config.tile.pixels, config.tile.block_c, config.swapped)
        if kept.get(shape, 0) < 4 and len(chosen) < limit:
            kept[shape] = kept.get(shape, 0) + 1
            chosen.append(config)
    return chosen


def _staged(view: ConvView, tile: TritonTile, swapped: bool, residual: bool, shared: int) -> list[PersistentTile]:
    """A tile's configurations whose accumulator does not spill, each with the deepest pipeline that fits."""
    found: list[PersistentTile] = []
    area = tile.block_k * tile.pixels
    rows = tile.block_k if swapped else tile.pixels  # of the tensor core's first operand: 64 a warpgroup
    for warps in (4, 8):
        if area > warps * 32 * 128 or (warps == 8 and (area < 128 * 128 or rows < 128)):
            continue
        # With swap-AB, splitting the columns costs a pass over shared memory in all other cases.
        for parts in (1, 2) if not swapped or (tile.block_k, tile.pixels, warps) == (128, 128, 4) else (1,):
            for blocks in (1, 2):
                if blocks * warps * 32 * (area // (warps * 32) + 48) > _REGISTERS:
                    continue
                room = shared // blocks - _result_bytes(view, tile, parts, residual)
                deepest = next((n for n in (8, 6, 5, 4, 3) if n * _stage_bytes(view, tile) <= room), None)
                if deepest:
                    staged = replace(tile, stages=deepest, warps=warps)
                    found.append(PersistentTile(staged, parts, blocks, swapped))
    return found


class PersistentExecutable(TritonSwapABExecutable):
    """One tile configuration for one problem."""

    def __init__(
        self, engine: str, view: ConvView, config: PersistentTile, dtype: str, epilogue: Epilogue, target: Target
    ) -> None:
        self.config = config
        super().__init__(engine, view, config.tile, dtype, epilogue, target)
        self.total = math.prod(config.tile.tiles(view))
        self.grid = max(1, min(self.total, target.units * config.blocks))

    @property
    def y_box(self) -> list[int]:
        """Block of y's descriptor: one part of the channels."""
        tile = self.tile
        return [tile.block_n, tile.block_h, tile.block_w, tile.block_k // self.config.parts]

    @property
    def x_box(self) -> list[int]:
        """Block of x's descriptor; two sizes where pixels are the first operand."""
        return super().x_box if self.config.swapped else [self.tile.pixels, self.tile.block_c]

    def _build(self, engine: str, dtype: str) -> KernelBuild:
        import triton.language as tl

        from convoy.engines.triton.kernels.persistent_kernel import persistent_conv  # pyright: ignore[reportUnknownVariableType]

        tile, view, fused = self.tile, self.view, self.epilogue
        signature = {
            "x": box_type(dtype, self.x_box), "w": box_type(dtype, [tile.block_k, tile.block_c]),
            "y": box_type(dtype, self.y_box), "residual": box_type(dtype, self.y_box) if fused.residual else "none",
            "bias": f"*{dtype}" if fused.bias else "none",
        } | dict.fromkeys(_SIZES, "i32")  # fmt: skip
        constants: dict[str, Any] = {
            "S": view.s, "STRIDE_H": view.stride_h if view.strided else 1,
            "STRIDE_W": view.stride_w if view.strided else 1,
            "BLOCK_K": tile.block_k, "BLOCK_N": tile.block_n, "BLOCK_H": tile.block_h, "BLOCK_W": tile.block_w,
            "BLOCK_C": tile.block_c, "SWAPPED": self.config.swapped, "PARTS": self.config.parts,
            "ACTIVATION": fused.activation, "PRECISION": "tf32",
            "DTYPE": {"fp16": tl.float16, "bf16": tl.bfloat16, "fp32": tl.float32}[dtype],
            "WAIT": tile.pdl and not interpreting(),
        }  # fmt: skip
        rounded = ["x"] if dtype == "fp32" else []
        return KernelBuild(
            engine, persistent_conv, signature, constants, ["bias"], tile.warps, tile.stages, tile.pdl, rounded
        )

    def x_descriptor(self, x: torch.Tensor) -> Any:
        """A matrix of pixels and channels where they are the first operand."""
        if self.config.swapped:
            return super().x_descriptor(x)
        return descriptor(x, [self.view.pixels, self.view.c], self.x_box)

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        """One launch."""
        view = self.view
        if not view.pixels:
            return
        x, y, residual = checked(buffers, self.epilogue.residual, slices=True)
        weight, bias = buffers.constants[0], buffers.constants[1] if self.epilogue.bias else None
        out_shape = [view.n, view.p, view.q, view.k]
        tiles_k, _, tiles_h, tiles_w = self.tile.tiles(view)
        arguments = [
            self.x_descriptor(x),
            descriptor(weight, list(weight.shape), [self.tile.block_k, self.tile.block_c]),
            self.y_descriptor(y),
            None if residual is None else descriptor(residual, out_shape, self.y_box),
            bias,
            self.total, tiles_k, tiles_h, tiles_w, self.tile.c_blocks(view), self.tile.iterations(view), view.c,
            view.pad_h, view.pad_w, view.dilation_h, view.dilation_w,
        ]  # fmt: skip
        self.kernel((self.grid, 1, 1), arguments)


class PersistentEngine(TiledKernelEngine[PersistentTile]):
    """Large tiles, one or two thread blocks a multiprocessor; see `kernels/persistent.py`."""

    id = "triton.persistent"
    family = "implicit_gemm"
    devices = ("cuda",)
    writes_slices = True
    trusted = False
    tile_config = PersistentTile
    quick_settings = 3
    """The best of the first four settings is 2.5 % behind the best of twelve (ResNet-50 at batch 32, H100)."""

    def supports(self, problem: Problem, target: Target) -> Support:
        """Accepts the problems of `triton.swapped`."""
        if not (found := product_support(problem, target)):
            return found
        assert isinstance(problem, ConvProblem)
        return tensor_support(view_of(problem))

    def tile_configs(self, problem: ConvProblem, units: int) -> Sequence[PersistentTile]:
        """See the function of this name."""
        return tile_configs(view_of(problem), units, problem.epilogue.residual)

    def space(self, problem: Problem, target: Target) -> Sequence[Knobs]:
        """The configurations that fit the GPU's shared memory, by rising estimated time."""
        assert isinstance(problem, ConvProblem)
        shared = shared_limit(target)
        found = tile_configs(view_of(problem), target.units, problem.epilogue.residual, shared=shared)
        return [config.knobs for config in found]

    def estimate_tile_us(self, problem: ConvProblem, config: PersistentTile, units: int) -> float:
        """See `estimate_us` above."""
        return estimate_us(view_of(problem), config, units)

    def build_tile(self, problem: ConvProblem, config: PersistentTile, target: Target) -> Executable:
        """Compile one tile configuration; needs no GPU."""
        return PersistentExecutable(self.id, view_of(problem), config, problem.x_dtype, problem.epilogue, target)


ENGINE = PersistentEngine()
