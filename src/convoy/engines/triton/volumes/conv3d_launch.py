"""Builds and launches the kernels of `triton.conv3d`: one with TMA boxes, one with gathered loads."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from convoy.engines.base import Buffers, Executable, Packed
from convoy.engines.gpu.device_tensors import as_floats, as_images, checked, descriptor, round_tf32, scratch, vector
from convoy.engines.gpu.gpu_support_checks import is_strict
from convoy.engines.triton.igemm_swap_ab_launch import ReduceSplits, box_type, pack_bias
from convoy.engines.triton.triton_build import KernelBuild, TritonKernel, interpreting
from convoy.engines.triton.volumes.conv3d_tile import VolumeTile, strided_planes
from convoy.problem import Conv3dProblem, Epilogue
from convoy.target import Target

_BOX_SIZES: Final = ("tiles_k", "tiles_d", "tiles_h", "tiles_w", "c_blocks", "iterations", "iterations_split", "images",
                     "depth", "channels", "pad_d", "pad_h", "pad_w", "dilation_h", "dilation_w")  # fmt: skip
_GATHER_SIZES: Final = ("pixels", "out_d", "p", "q", "depth", "h", "width", "c", "k", "c_blocks", "iterations",
                        "iterations_split", "tiles_k", "pad_d", "pad_h", "pad_w", "dilation_d", "dilation_h",
                        "dilation_w")  # fmt: skip


class VolumeExecutable(Executable):
    """One tile of one kernel for one problem; subclasses know the kernel."""

    def __init__(self, engine: str, problem: Conv3dProblem, tile: VolumeTile, target: Target) -> None:
        self.problem, self.tile = problem, tile
        self.splits, self.each = tile.splits(problem)
        self.workspace_bytes = tile.split_bytes(problem)
        self.reduce: ReduceSplits | None = None
        if not problem.y_spec.elements:
            return
        self.dependent = tile.pdl and target.capability >= 90 and not interpreting()
        triggers = (self.dependent or self.splits > 1) and target.capability >= 90 and not interpreting()
        fused = Epilogue() if self.splits > 1 else problem.epilogue
        common = {
            "BLOCK_K": tile.block_k, "BLOCK_C": tile.block_c, "ACTIVATION": fused.activation, "SPLIT": self.splits > 1,
            "PRECISION": "ieee" if is_strict(problem) else "tf32", "WAIT": self.dependent, "TRIGGER": triggers,
            "T": problem.window[0], "S": problem.window[2],
            **{f"STRIDE_{side}": step for side, step in zip("DHW", problem.stride, strict=True)},
        }  # fmt: skip
        self.kernel = TritonKernel(self.build_of(engine, fused, common), target)
        if self.splits > 1:
            elements = problem.y_spec.elements
            self.reduce = ReduceSplits(
                engine, elements, problem.k, self.splits, problem.dtype, problem.epilogue, target
            )

    @abstractmethod
    def build_of(self, engine: str, fused: Epilogue, common: Mapping[str, object]) -> KernelBuild:
        """What is compiled; `common` are the constants that both kernels have."""

    @abstractmethod
    def operands(
        self, x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, residual: torch.Tensor | None
    ) -> list[Any]:
        """The kernel's first four arguments, of tensors as `as_images` sees them or the partial sums as y."""

    @property
    @abstractmethod
    def sizes(self) -> list[int]:
        """The kernel's integer arguments."""

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        """One launch, or two where the reduction is split."""
        problem = self.problem
        if not problem.y_spec.elements:
            return
        args = tuple(as_images(arg) for arg in buffers.args)
        seen = Buffers(args, [result if result is None else as_images(result) for result in buffers.results])
        x, y, residual = checked(seen, problem.epilogue.residual)
        weight, bias = buffers.constants[0], buffers.constants[1] if problem.epilogue.bias else None
        grid = (math.prod(self.tile.tiles(problem)), self.splits, 1)
        partial = scratch(workspace, self.workspace_bytes)
        if partial is None or self.reduce is None:
            self.kernel(grid, [*self.operands(x, weight, y, residual), bias, *self.sizes])
            return
        sums = as_floats(partial, self.splits * problem.y_spec.elements)
        self.kernel(grid, [*self.operands(x, weight, sums, None), None, *self.sizes])
        self.reduce.launch(sums, y, residual, bias)


class BoxExecutable(VolumeExecutable):
    """X, weight and y go through TMA."""

    @property
    def y_box(self) -> list[int]:
        """Block of y's descriptor."""
        tile = self.tile
        return [1, tile.block_d, tile.block_h, tile.block_w, tile.block_k]

    @property
    def x_box(self) -> list[int]:
        """Block of x's descriptor."""
        tile = self.tile
        if strided_planes(self.problem):
            return [1, tile.block_h, 1, tile.block_w, tile.block_c]
        return [1, tile.block_d, tile.block_h, tile.block_w, tile.block_c]

    def build_of(self, engine: str, fused: Epilogue, common: Mapping[str, object]) -> KernelBuild:
        """The kernel of TMA boxes."""
        import triton.language as tl

        from convoy.engines.triton.kernels.volume_kernels import volume_conv  # pyright: ignore[reportUnknownVariableType]

        problem, tile, split = self.problem, self.tile, self.splits > 1
        dtype = problem.dtype
        signature = {
            "x": box_type(dtype, self.x_box),
            "w": box_type(dtype, [tile.block_k, tile.block_c]),
            "y": box_type("fp32" if split else dtype, self.y_box),
            "residual": box_type(dtype, self.y_box) if fused.residual else "none",
            "bias": f"*{dtype}" if fused.bias else "none",
        } | dict.fromkeys(_BOX_SIZES, "i32")
        constants: dict[str, Any] = {
            **common, "DILATION_D": problem.dilation[0] if problem.window[0] > 1 else 1, "DEPTH": tile.depth,
            "BLOCK_D": tile.block_d, "BLOCK_H": tile.block_h, "BLOCK_W": tile.block_w,
            "DTYPE": {"fp16": tl.float16, "bf16": tl.bfloat16, "fp32": tl.float32}["fp32" if split else dtype],
        }  # fmt: skip
        rounded = ["x"] if dtype == "fp32" else []
        return KernelBuild(
            engine, volume_conv, signature, constants, ["bias"], tile.warps, tile.stages, self.dependent, rounded
        )

    def pack(self, constants: Sequence[torch.Tensor]) -> Packed:
        """The weight as rows [k-tile, tap, c-block, t, BLOCK_K] of BLOCK_C, with zeros up to whole tiles; the bias likewise."""
        tile = self.tile
        weight = round_tf32(constants[0])
        k, c, t, r, s = weight.shape
        c_pad = -c % tile.block_c
        rows = torch.nn.functional.pad(
            weight.permute(0, 3, 4, 2, 1).reshape(k, r * s, t, c), (0, c_pad, 0, 0, 0, 0, 0, -k % tile.block_k)
        )
        rows = rows.reshape(-1, tile.block_k, r * s, t, (c + c_pad) // tile.block_c, tile.block_c)
        packed = rows.permute(0, 2, 4, 3, 1, 5).reshape(-1, tile.block_c).contiguous()
        return (packed, *(pack_bias(bias, tile.block_k) for bias in constants[1:]))

    def operands(
        self, x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, residual: torch.Tensor | None
    ) -> list[Any]:
        """Descriptors."""
        problem, tile = self.problem, self.tile
        shape = [problem.n * (self.splits if y.dim() == 1 else 1), *problem.y_size, problem.k]
        return [
            self._x_descriptor(x),
            descriptor(weight, list(weight.shape), [tile.block_k, tile.block_c]),
            descriptor(y, shape, self.y_box),
            None if residual is None else descriptor(residual, shape, self.y_box),
        ]

    def _x_descriptor(self, x: torch.Tensor) -> Any:
        problem = self.problem
        (d, h, w), c = problem.size, problem.c
        if not strided_planes(problem):
            return descriptor(x, [problem.n, d, h, w, c], self.x_box)
        _, stride_h, stride_w = problem.stride
        shape = [problem.n * d, h // stride_h, stride_h, w // stride_w, stride_w * c]
        return descriptor(x, shape, self.x_box, [h * w * c, stride_h * w * c, w * c, stride_w * c, 1])

    @property
    def sizes(self) -> list[int]:
        """In the order of `_BOX_SIZES`."""
        problem, tile = self.problem, self.tile
        tiles_k, _, *tiles = tile.tiles(problem)
        return [
            tiles_k, *tiles, tile.c_blocks(problem), tile.iterations(problem), self.each, problem.n, problem.size[0],
            problem.c, *problem.pad, *problem.dilation[1:],
        ]  # fmt: skip


class GatherVolumeExecutable(VolumeExecutable):
    """Gathered loads, for every size."""

    def build_of(self, engine: str, fused: Epilogue, common: Mapping[str, object]) -> KernelBuild:
        """The kernel of gathered loads."""
        from convoy.engines.triton.kernels.volume_kernels import volume_gather  # pyright: ignore[reportUnknownVariableType]

        problem, tile = self.problem, self.tile
        dtype = problem.dtype
        signature = {
            "x": f"*{dtype}", "w": f"*{dtype}", "y": "*fp32" if self.splits > 1 else f"*{dtype}",
            "residual": f"*{dtype}" if fused.residual else "none", "bias": f"*{dtype}" if fused.bias else "none",
        } | dict.fromkeys(_GATHER_SIZES, "i32")  # fmt: skip
        constants: dict[str, Any] = {
            **common, "R": problem.window[1], "BLOCK_P": tile.pixels, "FLAT": tile.flat, "VECTOR_C": vector(problem.c),
            "VECTOR_K": vector(problem.k), "ROUND": dtype == "fp32" and not is_strict(problem),
        }  # fmt: skip
        pointers = ["x", "w", "y", "residual", "bias"]
        return KernelBuild(
            engine, volume_gather, signature, constants, pointers, tile.warps, tile.stages, self.dependent,
            tensor_cores=False,
        )  # fmt: skip

    def pack(self, constants: Sequence[torch.Tensor]) -> Packed:
        """The weight as [k, t, r, s, c], rounded where TF32 would cut it; the bias as it is."""
        weight = constants[0] if is_strict(self.problem) else round_tf32(constants[0])
        return (weight.permute(0, 2, 3, 4, 1).contiguous(), *(bias.contiguous() for bias in constants[1:]))

    def operands(
        self, x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, residual: torch.Tensor | None
    ) -> list[Any]:
        """The tensors."""
        return [x, weight, y, residual]

    @property
    def sizes(self) -> list[int]:
        """In the order of `_GATHER_SIZES`."""
        problem, tile = self.problem, self.tile
        return [
            problem.pixels, *problem.y_size, *problem.size, problem.c // vector(problem.c), problem.k // vector(problem.k),
            tile.c_blocks(problem), tile.iterations(problem), self.each, tile.tiles(problem)[0], *problem.pad,
            *problem.dilation,
        ]  # fmt: skip
