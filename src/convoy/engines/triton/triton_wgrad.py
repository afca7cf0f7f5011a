"""triton.wgrad: the weight gradient, one matrix product over pixels for each filter tap; partial sums are added in a fixed order.

How the kernel works: `kernels/gradient_kernels.py` and docs/kernels/training.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from convoy.engines.base import Buffers, Engine, Executable
from convoy.engines.gpu.device_tensors import as_floats, dense_nhwc, descriptor, scratch
from convoy.engines.gpu.gpu_support_checks import product_support
from convoy.engines.triton.igemm_swap_ab_launch import ReduceSplits, box_type
from convoy.engines.triton.triton_build import KernelBuild, TritonKernel, interpreting, shared_limit
from convoy.engines.triton.triton_tiles import ConvView
from convoy.engines.triton.triton_wgrad_tile import WgradTile, estimate_us, partial_bytes, wgrad_tiles, wgrad_view
from convoy.errors import LaunchError
from convoy.problem import ConvProblem, Epilogue, Knobs, Problem
from convoy.problem.spec import DTYPE_BYTES
from convoy.support import Support
from convoy.target import Target

_SIZES = ("tiles_c", "image_blocks", "tiles_h", "tiles_w", "blocks", "blocks_split", "taps", "c", "k", "channels",
          "pad_h", "pad_w", "dilation_h", "dilation_w")  # fmt: skip


class WgradExecutable(Executable):
    """One tile configuration for one problem. x is dense, or lies as `view` and `pitches` describe.

    Args:
        engine: the engine's id.
        problem: the weight gradient.
        tile: the tile configuration.
        target: the GPU.
        view: the problem as the kernel sees it; `wgrad_view` where it is None.
        pitches: elements from an image, a row, a pixel of x to the next; those of a dense x where it is None.
    """

    def __init__(
        self, engine: str, problem: ConvProblem, tile: WgradTile, target: Target,
        view: ConvView | None = None, pitches: tuple[int, int, int] | None = None,
    ) -> None:  # fmt: skip
        self.problem, self.tile, self.view = problem, tile, view or wgrad_view(problem)
        self.workspace_bytes = partial_bytes(self.view, tile)
        row = self.view.w * self.view.c
        self.pitches = pitches or (self.view.h * row, row, self.view.c)
        self.reduce = None
        if self.view.pixels == 0:
            return
        self.split_count, self.each = tile.splits(self.view)
        self.kernel = TritonKernel(self._build(engine), target)
        if self.split_count > 1:
            elements = problem.weight_spec.elements
            self.reduce = ReduceSplits(
                engine, elements, problem.c, self.split_count, problem.weight_dtype, Epilogue(), target
            )

    def _build(self, engine: str) -> KernelBuild:
        import triton.language as tl

        from convoy.engines.triton.kernels.gradient_kernels import wgrad_conv  # pyright: ignore[reportUnknownVariableType]

        tile, view, dtype = self.tile, self.view, self.problem.x_dtype
        split = self.split_count > 1
        strided = view.strided or (view.is_1x1 and not tile.images and view.stride_h * view.stride_w > 1)
        signature = {
            "x": box_type(dtype, self._x_box), "dy": box_type(dtype, self._dy_box),
            "out": "*fp32" if split else f"*{dtype}",
        } | dict.fromkeys(_SIZES, "i32")  # fmt: skip
        steps = (view.stride_h, view.stride_w) if tile.images or (strided and not view.is_1x1) else (1, 1)
        kind = {"fp16": tl.float16, "bf16": tl.bfloat16, "fp32": tl.float32}[dtype]
        constants: dict[str, Any] = {
            "S": view.s, "STRIDE_H": steps[0], "STRIDE_W": steps[1], "BLOCK_K": tile.block_k,
            "BLOCK_N": tile.block_n, "BLOCK_H": tile.block_h, "BLOCK_W": tile.block_w, "BLOCK_C": tile.block_c,
            "IMAGES": tile.images, "PRECISION": "tf32", "DTYPE": tl.float32 if split else kind,
            "WAIT": tile.pdl and not interpreting(),
        }  # fmt: skip
        rounded = ["x", "dy"] if dtype == "fp32" else []
        whole = ["c"] if self.problem.c % 16 == 0 else []
        return KernelBuild(
            engine, wgrad_conv, signature, constants, ["out", *whole], tile.warps, tile.stages, tile.pdl, rounded
        )

    @property
    def _dy_box(self) -> list[int]:
        tile = self.tile
        if tile.images:
            return [1, 1, tile.block_n, tile.block_k]
        return [tile.block_n, tile.block_h, tile.block_w, tile.block_k]

    @property
    def _x_box(self) -> list[int]:
        tile = self.tile
        if tile.images:
            return [1, 1, tile.block_n, tile.block_c]
        if self.view.strided:
            return [tile.block_n, tile.block_h, 1, tile.block_w, tile.block_c]
        return [tile.block_n, tile.block_h, tile.block_w, tile.block_c]

    def _descriptors(self, x: torch.Tensor, dy: torch.Tensor) -> tuple[Any, Any]:
        view = self.view
        n, h, w, c, k = view.n, view.h, view.w, view.c, view.k
        image, row, pixel = self.pitches
        out_row = view.q * k
        if self.tile.images:
            return (
                descriptor(x, [h, w, n, c], self._x_box, [row, pixel, image, 1]),
                descriptor(dy, [view.p, view.q, n, k], self._dy_box, [out_row, k, view.p * out_row, 1]),
            )
        high, wide = view.stride_h, view.stride_w
        if view.strided:
            shape = [n, h // high, high, w // wide, wide * c]
            strides = [image, high * row, row, wide * c, 1]
        elif view.is_1x1:
            shape, strides = [n, view.p, view.q, c], [image, high * row, wide * pixel, 1]
        else:
            shape, strides = [n, h, w, c], [image, row, pixel, 1]
        return descriptor(x, shape, self._x_box, strides), descriptor(dy, [n, view.p, view.q, k], self._dy_box)

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        """One launch, and a second one if the sum is split; the bias gradient is PyTorch's sum over dy."""
        x, dy, dweight = asked(self.problem, buffers)
        if self.view.pixels == 0:
            dweight.zero_()
            return
        self.sum_products(x, dy, dweight, scratch(workspace, self.workspace_bytes))

    def sum_products(
        self, x: torch.Tensor, dy: torch.Tensor, dweight: torch.Tensor, partial: torch.Tensor | None
    ) -> None:
        """The launches, for an x with strides `pitches`."""
        view, tile = self.view, self.tile
        sums = None if partial is None else as_floats(partial, self.split_count * dweight.numel())
        tiles_k, tiles_c = tile.tiles(view)
        taps = view.r * view.s
        tiles_h, tiles_w = -(-view.p // tile.block_h), -(-view.q // tile.block_w)
        self.kernel(
            (tiles_k * tiles_c * taps, self.split_count, 1),
            [
                *self._descriptors(x, dy), dweight if sums is None else sums, tiles_c, -(-view.n // tile.block_n),
                tiles_h, tiles_w, tile.blocks(view), self.each, taps, view.c, view.k, view.c,
                view.pad_h, view.pad_w, view.dilation_h, view.dilation_w,
            ],
        )  # fmt: skip
        if self.reduce is not None and sums is not None:
            self.reduce.launch(sums, dweight, None, None)


def asked(problem: ConvProblem, buffers: Buffers) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, dy and dweight of a launch, dense. If the problem has a bias, PyTorch's sum over dy is queued too."""
    x, dy = dense_nhwc("x", buffers.args[0]), dense_nhwc("dy", buffers.args[1])
    dweight = buffers.results[0]
    if dweight is None:
        raise LaunchError("dweight: no tensor was given to write to")
    if problem.epilogue.bias:
        dbias = buffers.results[1]
        if dbias is None:
            raise LaunchError("dbias: no tensor was given to write to")
        torch.sum(dy, (0, 2, 3), out=dbias)
    return x, dy, dense_nhwc("dweight", dweight)


class WgradEngine(Engine):
    """dweight from x and dy; see `kernels/gradient_kernels.py`."""

    id = "triton.wgrad"
    family = "implicit_gemm"
    devices = ("cuda",)
    trusted = False
    quick_settings = 3

    def supports(self, problem: Problem, target: Target) -> Support:
        """Weight gradients without groups on Hopper, c and k multiples of 16 bytes; fp32 as TF32 where the numerics allow."""
        if not (found := product_support(problem, target, "wgrad")):
            return found
        assert isinstance(problem, ConvProblem)
        whole = 16 // DTYPE_BYTES[problem.x_dtype]
        if problem.c % whole or problem.k % whole:
            return Support.no(f"needs c and k as multiples of {whole}, got {problem.c} and {problem.k}")
        return Support.yes()

    def space(self, problem: Problem, target: Target) -> Sequence[Knobs]:
        """Tiles by rising estimated time."""
        assert isinstance(problem, ConvProblem)
        return [tile.knobs for tile in wgrad_tiles(wgrad_view(problem), target.units, shared=shared_limit(target))]

    def workspace_bytes(self, problem: Problem, knobs: Knobs) -> int:
        """The partial sums."""
        assert isinstance(problem, ConvProblem)
        return partial_bytes(wgrad_view(problem), WgradTile.of(knobs))

    def estimate_us(self, problem: Problem, knobs: Knobs, target: Target) -> float:
        """The tile's cost model, less a fifth: fitted to 406 rows of an H200 (error 20 %)."""
        assert isinstance(problem, ConvProblem)
        return 0.4 + 0.81 * estimate_us(wgrad_view(problem), WgradTile.of(knobs), target.units)

    def build(self, problem: Problem, knobs: Knobs, target: Target) -> Executable:
        """Compile one tile."""
        assert isinstance(problem, ConvProblem)
        return WgradExecutable(self.id, problem, WgradTile.of(knobs), target)


ENGINE = WgradEngine()
