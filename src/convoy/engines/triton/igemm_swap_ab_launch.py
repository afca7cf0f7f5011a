"""Builds and launches the swap-AB kernel for any view: shared by the engines `triton.swapped`, `triton.pointwise` and others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from convoy.engines.base import Buffers, Executable, Packed
from convoy.engines.gpu.device_tensors import as_floats, checked, descriptor, fits_tma, pitch_of, round_tf32, scratch
from convoy.engines.triton.triton_build import TORCH_DTYPE, KernelBuild, TritonKernel, interpreting
from convoy.engines.triton.triton_tiles import ConvView, TritonTile
from convoy.problem import Epilogue
from convoy.target import Target

_SIZES = ("tiles_k", "tiles_h", "tiles_w", "c_blocks", "iterations", "iterations_split", "images", "channels",
          "pad_h", "pad_w", "dilation_h", "dilation_w")  # fmt: skip


def box_type(dtype: str, block: Sequence[int]) -> str:
    """Triton's name of a descriptor's type."""
    return f"tensordesc<{dtype}[{', '.join(map(str, block))}]>"


def workspace_bytes(view: ConvView, tile: TritonTile) -> int:
    """Bytes of the partial sums: none where the reduction is not split."""
    splits, _ = tile.splits(view)
    return 4 * splits * view.pixels * view.k if splits > 1 else 0


def pack_tiles(weight: torch.Tensor, tile: TritonTile) -> torch.Tensor:
    """[k, c, r, s] → rows [k-tile, tap, c-block, BLOCK_K] of BLOCK_C, so that one iteration reads contiguous memory.

    Channels beyond k and c are zeros, so that the kernel needs no masks.
    """
    k, c, r, s = weight.shape
    k_pad, c_pad = -k % tile.block_k, -c % tile.block_c
    rows = torch.nn.functional.pad(weight.permute(0, 2, 3, 1).reshape(k, r * s, c), (0, c_pad, 0, 0, 0, k_pad))
    rows = rows.reshape(-1, tile.block_k, r * s, (c + c_pad) // tile.block_c, tile.block_c).permute(0, 2, 3, 1, 4)
    return rows.reshape(-1, tile.block_c).contiguous()


def pack_bias(bias: torch.Tensor, block_k: int) -> torch.Tensor:
    """The bias with zeros up to a whole tile, read without masks."""
    return torch.nn.functional.pad(bias, (0, -bias.numel() % block_k)).contiguous()


class ReduceSplits:
    """The second launch of a split reduction: adds the parts in order and applies the epilogue."""

    BLOCK = 256

    def __init__(
        self, engine: str, elements: int, channels: int, splits: int, dtype: str, epilogue: Epilogue, target: Target
    ) -> None:
        self.elements, self.channels = elements, channels
        self._make = partial(self._build, engine, splits, dtype, epilogue, target)
        self.kernel = self._make(pitched=False)
        self.pitched: TritonKernel | None = None

    def _build(
        self, engine: str, splits: int, dtype: str, epilogue: Epilogue, target: Target, *, pitched: bool
    ) -> TritonKernel:
        from convoy.engines.triton.kernels.tile_epilogue import reduce_splits  # pyright: ignore[reportUnknownVariableType]

        channels = self.channels
        dependent = target.capability >= 90 and not interpreting()
        signature = {
            "partial": "*fp32", "y": f"*{dtype}", "residual": f"*{dtype}" if epilogue.residual else "none",
            "bias": f"*{dtype}" if epilogue.bias else "none", "elements": "i32", "channels": "i32",
            "pitch": "i32",
        }  # fmt: skip
        constants = {
            "SPLITS": splits, "BLOCK": self.BLOCK, "ACTIVATION": epilogue.activation, "PITCHED": pitched,
            "WAIT": dependent,
        }  # fmt: skip
        whole = ["elements", "channels"] if channels % 16 == 0 else []
        pointers = ["partial", "y", "residual", "bias"]
        build = KernelBuild(engine, reduce_splits, signature, constants, pointers + whole, warps=4, dependent=dependent)
        return TritonKernel(build, target)

    def accept_pitch(self) -> None:
        """Get ready for a y whose pixels lie further apart than its channels."""
        self.pitched = self.pitched or self._make(pitched=True)

    def launch(
        self, partial: torch.Tensor, y: torch.Tensor, residual: torch.Tensor | None, bias: torch.Tensor | None
    ) -> None:
        """Sum `partial` into y, which is dense unless `accept_pitch` was called."""
        grid = (-(-self.elements // self.BLOCK), 1, 1)
        pitch = self.channels if self.pitched is None else pitch_of(y)
        kernel = self.kernel if self.pitched is None or pitch == self.channels else self.pitched
        kernel(grid, [partial, y, residual, bias, self.elements, self.channels, pitch])


class TritonSwapABExecutable(Executable):
    """One tile of the swap-AB kernel for one view of a convolution."""

    def __init__(
        self, engine: str, view: ConvView, tile: TritonTile, dtype: str, epilogue: Epilogue, target: Target
    ) -> None:
        self.view, self.tile, self.epilogue, self.dtype = view, tile, epilogue, dtype
        self.reduce: ReduceSplits | None = None
        self.splits, self.each = tile.splits(view)
        self.workspace_bytes = workspace_bytes(view, tile)
        if view.pixels == 0:
            return
        self.kernel = TritonKernel(self._build(engine, dtype), target)
        if self.splits > 1:
            self.reduce = self.reduction(engine, target)

    def reduction(self, engine: str, target: Target) -> ReduceSplits:
        """The launch that adds the partial sums of a split reduction."""
        view = self.view
        return ReduceSplits(engine, view.pixels * view.k, view.k, self.splits, self.dtype, self.epilogue, target)

    @property
    def y_box(self) -> list[int]:
        """Block of y's descriptor."""
        tile = self.tile
        return [tile.block_n, tile.block_h, tile.block_w, tile.block_k]

    @property
    def x_box(self) -> list[int]:
        """Block of x's descriptor."""
        tile = self.tile
        if self.view.strided:
            return [tile.block_n, tile.block_h, 1, tile.block_w, tile.block_c]
        return [tile.block_n, tile.block_h, tile.block_w, tile.block_c]

    def _build(self, engine: str, dtype: str) -> KernelBuild:
        import triton.language as tl

        from convoy.engines.triton.kernels.igemm_swap_ab_kernel import swapped_conv  # pyright: ignore[reportUnknownVariableType]

        tile, view, split = self.tile, self.view, self.splits > 1
        fetch = tile.prefetch and not interpreting()
        fused = Epilogue() if split else self.epilogue
        signature = {
            "x": box_type(dtype, self.x_box),
            "w": box_type(dtype, [tile.block_k, tile.block_c]),
            "y": box_type("fp32" if split else dtype, self.y_box),
            "residual": box_type(dtype, self.y_box) if fused.residual else "none",
            "bias": f"*{dtype}" if fused.bias else "none",
            "w_bytes": "*i8" if fetch else "none",
        } | dict.fromkeys(_SIZES, "i32")
        constants: dict[str, Any] = {
            "S": view.s, "STRIDE_H": view.stride_h if view.strided else 1,
            "STRIDE_W": view.stride_w if view.strided else 1,
            "BLOCK_K": tile.block_k, "BLOCK_N": tile.block_n, "BLOCK_H": tile.block_h, "BLOCK_W": tile.block_w,
            "BLOCK_C": tile.block_c, "ACTIVATION": fused.activation, "PRECISION": "tf32",
            "DTYPE": {"fp16": tl.float16, "bf16": tl.bfloat16, "fp32": tl.float32}[dtype], "SPLIT": split,
            "WAIT": tile.pdl and not interpreting(), "TRIGGER": (split or tile.pdl) and not interpreting(),
            "PREFETCH_BYTES": tile.block_k * tile.block_c * view.bytes_each if fetch else 0, "WARPS": tile.warps,
        }  # fmt: skip
        rounded = ["x"] if dtype == "fp32" else []
        return KernelBuild(
            engine, swapped_conv, signature, constants, ["bias", "w_bytes"], tile.warps, tile.stages, tile.pdl, rounded
        )

    def pack(self, constants: Sequence[torch.Tensor]) -> Packed:
        """The weight in tile order, the bias padded to whole tiles."""
        weight = constants[0] if constants[0].dim() == 4 else constants[0][:, :, None, None]
        packed = pack_tiles(round_tf32(weight), self.tile)
        return (packed, pack_bias(constants[1], self.tile.block_k)) if self.epilogue.bias else (packed,)

    def accept_slice(self, result: int, pitch: int, offset: int) -> bool:
        """Where TMA can describe the slice."""
        if self.view.pixels == 0 or not fits_tma(TORCH_DTYPE[self.dtype], pitch, offset):
            return False
        if self.reduce is not None:
            self.reduce.accept_pitch()
        return True

    def y_strides(self, y: torch.Tensor) -> list[int]:
        """Strides of y as [n, p, q, k]: dense, or those of a slice of the channels of a larger tensor."""
        pitch, view = pitch_of(y), self.view
        return [view.p * view.q * pitch, view.q * pitch, pitch, 1]

    def y_descriptor(self, y: torch.Tensor) -> Any:
        """The kernel's descriptor of y."""
        view = self.view
        return descriptor(y, [view.n, view.p, view.q, view.k], self.y_box, self.y_strides(y))

    def x_images(self) -> int:
        """Images that x's descriptor spans."""
        return self.view.n

    def x_descriptor(self, x: torch.Tensor) -> Any:
        """The kernel's descriptor of x, whatever its logical shape."""
        view, images = self.view, self.x_images()
        row = view.w * view.c
        if view.strided:
            shape = [images, view.h // view.stride_h, view.stride_h, view.w // view.stride_w, view.stride_w * view.c]
            strides = [view.h * row, view.stride_h * row, row, view.stride_w * view.c, 1]
        elif view.is_1x1:
            shape = [images, view.p, view.q, view.c]
            strides = [view.h * row, view.stride_h * row, view.stride_w * view.c, 1]
        else:
            shape, strides = [images, view.h, view.w, view.c], [view.h * row, row, view.c, 1]
        return descriptor(x, shape, self.x_box, strides)

    def sizes(self) -> list[int]:
        """The integer arguments, in the order of `_SIZES`."""
        view, tile = self.view, self.tile
        tiles_k, _, tiles_h, tiles_w = tile.tiles(view)
        return [
            tiles_k, tiles_h, tiles_w, tile.c_blocks(view), tile.iterations(view), self.each, view.n, view.c,
            view.pad_h, view.pad_w, view.dilation_h, view.dilation_w,
        ]  # fmt: skip

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        """One launch, or two where the reduction is split."""
        if self.view.pixels:
            self.multiply(buffers.args[0], buffers, scratch(workspace, self.workspace_bytes))

    def multiply(
        self, x: torch.Tensor, buffers: Buffers, partial: torch.Tensor | None, extra: Sequence[Any] | None = None
    ) -> None:
        """The product of packed weight and x (or a rearranged x), and the sum of its parts.

        Args:
            x: the tensor that `x_descriptor` describes.
            buffers: the launch's buffers; the first two constants are weight and bias.
            partial: scratch for the partial sums, if the reduction is split.
            extra: arguments of the kernel between the bias and the sizes; by default the weight's address.
        """
        view = self.view
        _, y, residual = checked(buffers, self.epilogue.residual, slices=True)
        weight, bias = buffers.constants[0], buffers.constants[1] if self.epilogue.bias else None
        out_shape = [view.n, view.p, view.q, view.k]
        sums = None
        if partial is not None and self.splits > 1:
            sums = as_floats(partial, self.splits * view.pixels * view.k)
            out_shape[0] *= self.splits
        fused_residual = None if sums is not None or residual is None else descriptor(residual, out_shape, self.y_box)
        arguments = [
            self.x_descriptor(x),
            descriptor(weight, list(weight.shape), [self.tile.block_k, self.tile.block_c]),
            self.y_descriptor(y) if sums is None else descriptor(sums, out_shape, self.y_box),
            fused_residual,
            bias if sums is None else None,
            *((weight if self.tile.prefetch else None,) if extra is None else extra),
            *self.sizes(),
        ]
        self.run_product(arguments, buffers)
        if self.reduce is not None and sums is not None:
            self.add_parts(sums, y, residual, bias, buffers)

    def run_product(self, arguments: list[Any], buffers: Buffers) -> None:
        """The kernel's launch."""
        del buffers
        self.kernel((math.prod(self.tile.tiles(self.view)), self.splits, 1), arguments)

    def add_parts(
        self, sums: torch.Tensor, y: torch.Tensor, residual: torch.Tensor | None, bias: torch.Tensor | None,
        buffers: Buffers,
    ) -> None:  # fmt: skip
        """The sum of the parts of a split reduction."""
        del buffers
        assert self.reduce is not None
        self.reduce.launch(sums, y, residual, bias)


__all__ = [
    "TORCH_DTYPE",
    "ReduceSplits",
    "TritonSwapABExecutable",
    "box_type",
    "pack_bias",
    "pack_tiles",
    "workspace_bytes",
]
