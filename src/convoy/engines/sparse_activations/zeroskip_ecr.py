"""zeroskip.ecr: ECR and PECR as published, for whole layers: the point of reference (docs/kernels/sparse-activations.md)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import torch

from convoy.engines.activation_sparsity import sparsity_percent
from convoy.engines.base import Buffers, Engine, Executable, Packed
from convoy.engines.gpu.device_tensors import checked
from convoy.engines.scratch import Scratch
from convoy.engines.sparse_activations.zeroskip_tiles import tile_support
from convoy.engines.triton.triton_build import TORCH_DTYPE, KernelBuild, TritonKernel
from convoy.errors import LaunchError
from convoy.problem import ConvProblem, Knobs, Pool, Problem
from convoy.support import Support
from convoy.target import Target

MOST_BYTES: Final = 1 << 30
"""Of the compressed windows, which hold every value of x once for each tap that reads it."""

_START_US, _COMPRESSED_US, _BLOCK_US, _FLOPS_US, _STEP_US = 5.0, 1.7e5, 1.5e-3, 5e6, 0.09
"""Of the cost model: launches, values compressed a microsecond, a thread block, operations a microsecond, a step of a block."""

_LENGTH: Final = 256
"""Places of a window that a thread block of the first pass looks at together, at most."""

_PLACES: Final = 1024
"""The same of several short windows."""

_FEW: Final = 32
"""With at most this many filters, a thread block of the second pass computes several pixels, `_WORK` results in all: with one
filter a warp would have one result."""

_WORK: Final = 128

_LOOK_SIZES: Final = (
    "windows",
    "p",
    "q",
    "h",
    "width",
    "c",
    "stride_h",
    "stride_w",
    "dilation_h",
    "dilation_w",
    "pad_h",
    "pad_w",
    "all_kept",
)
_SIZES: Final = ("results", "p", "q", "k", "y_h", "y_w", "tiles_k", "length")
_ONE: Final = Pool("max", 1, 1, 1, 1)


def layout(problem: ConvProblem) -> Scratch:
    """Values, places and count of every window, at its full length."""
    windows, length = problem.n * problem.p * problem.q, problem.reduction_length
    found = Scratch()
    found.add((windows, length), TORCH_DTYPE[problem.x_dtype])
    found.add((windows, length), torch.int32)
    found.add((windows,), torch.int32)
    return found


def pixels_of(block_k: int) -> int:
    """Result pixels of a thread block of the second pass."""
    return 1 if block_k > _FEW else max(1, _WORK // block_k)


class EcrExecutable(Executable):
    """Compress, then multiply."""

    def __init__(self, engine: str, problem: ConvProblem, knobs: Knobs, target: Target) -> None:
        self.problem, self.block_k = problem, knobs.integer("block_k")
        self.pixels = pixels_of(self.block_k)
        self.block = min(_LENGTH, 1 << max(4, (problem.reduction_length - 1).bit_length()))
        self.windows = 1 if self.block == _LENGTH else _PLACES // self.block
        self._layout = layout(problem)
        self.workspace_bytes = self._layout.size_bytes
        self.look = TritonKernel(self._look_build(engine), target)
        self.kernel = TritonKernel(self._build(engine, knobs.integer("warps")), target)

    def _look_build(self, engine: str) -> KernelBuild:
        from convoy.engines.sparse_activations.kernels.ecr_kernels import compress_windows  # pyright: ignore[reportUnknownVariableType]

        dtype = self.problem.x_dtype
        signature = {"x": f"*{dtype}", "values": f"*{dtype}", "places": "*i32", "counts": "*i32"}
        signature |= dict.fromkeys(_LOOK_SIZES, "i32")
        constants: dict[str, Any] = {
            "R": self.problem.r,
            "S": self.problem.s,
            "WINDOWS": self.windows,
            "BLOCK": self.block,
        }
        pointers = ["x", "values", "places", "counts"]
        return KernelBuild(engine, compress_windows, signature, constants, pointers, 4, 1, tensor_cores=False)

    def _build(self, engine: str, warps: int) -> KernelBuild:
        from convoy.engines.sparse_activations.kernels.ecr_kernels import multiply_windows  # pyright: ignore[reportUnknownVariableType]

        problem, dtype = self.problem, self.problem.x_dtype
        pool = problem.epilogue.pool or _ONE
        signature = {
            "values": f"*{dtype}", "places": "*i32", "counts": "*i32", "w": f"*{dtype}", "y": f"*{dtype}",
            "residual": f"*{dtype}" if problem.epilogue.residual else "none",
            "bias": f"*{dtype}" if problem.epilogue.bias else "none",
        } | dict.fromkeys(_SIZES, "i32")  # fmt: skip
        constants: dict[str, Any] = {
            "WINDOW_H": pool.window_h, "WINDOW_W": pool.window_w, "POOL_STRIDE_H": pool.stride_h,
            "POOL_STRIDE_W": pool.stride_w, "POOL_PAD_H": pool.pad_h, "POOL_PAD_W": pool.pad_w,
            "AVERAGE": pool.kind == "avg", "COUNT_PAD": pool.count_include_pad,
            "PIXELS": self.pixels, "BLOCK_K": self.block_k,
            "ACTIVATION": problem.epilogue.activation,
        }  # fmt: skip
        pointers = ["values", "places", "counts", "w", "y", "residual", "bias"]
        return KernelBuild(engine, multiply_windows, signature, constants, pointers, warps, 1, tensor_cores=False)

    def pack(self, constants: Sequence[torch.Tensor]) -> Packed:
        """The weight as [r, s, c, k]; the bias; whether all weights are finite."""
        weight = constants[0].detach()
        packed = weight.permute(2, 3, 1, 0).contiguous()
        return packed, *(b.contiguous() for b in constants[1:]), bool(torch.isfinite(weight).all())

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        """Two launches."""
        problem, epilogue = self.problem, self.problem.epilogue
        x, y, residual = checked(buffers, epilogue.residual)
        if workspace is None or workspace.numel() < self.workspace_bytes:
            raise LaunchError(f"workspace: expected at least {self.workspace_bytes} bytes")
        values, places, counts = self._layout.views(workspace)
        weight, finite = buffers.constants[0], buffers.constants[-1]
        bias = buffers.constants[1] if epilogue.bias else None
        names = ("p", "q", "h", "w", "c", "stride_h", "stride_w", "dilation_h", "dilation_w", "pad_h", "pad_w")
        looked = [getattr(problem, name) for name in names]
        count = problem.n * problem.p * problem.q
        self.look((-(-count // self.windows), 1, 1), [x, values, places, counts, count, *looked, int(not finite)])
        _, _, y_h, y_w = problem.y_spec.shape
        tiles_k, results = -(-problem.k // self.block_k), problem.n * y_h * y_w
        sizes = [results, problem.p, problem.q, problem.k, y_h, y_w, tiles_k, problem.reduction_length]
        grid = (-(-results // self.pixels) * tiles_k, 1, 1)
        self.kernel(grid, [values, places, counts, weight, y, residual, bias, *sizes])


class EcrEngine(Engine):
    """fp32, fp16 and bf16; products and sums in fp32."""

    id = "zeroskip.ecr"
    devices = ("cuda",)
    offered_by_default = False
    version = 2
    family = "direct"
    trusted = False
    skips_zeros = True

    def supports(self, problem: Problem, target: Target) -> Support:
        """NHWC, no groups, any pooling, windows of at most 1 GiB in all."""
        found = tile_support(problem, target, ("fp32", "fp16", "bf16"))
        if not found or not isinstance(problem, ConvProblem):
            return found
        size = layout(problem).size_bytes
        if size > MOST_BYTES or math.prod((problem.n, problem.p, problem.q, problem.reduction_length)) >= 2**31:
            return Support.no(f"needs at most {MOST_BYTES} bytes of compressed windows, got {size}")
        return Support.yes()

    def space(self, problem: Problem, target: Target) -> Sequence[Knobs]:
        """Filters of a thread block."""
        assert isinstance(problem, ConvProblem)
        if problem.k <= _FEW:
            return [Knobs.of(block_k=1 << (problem.k - 1).bit_length(), warps=warps) for warps in (4, 1)]
        return [Knobs.of(block_k=block_k, warps=max(1, block_k // 64)) for block_k in (64, 128, 256)]

    def workspace_bytes(self, problem: Problem, knobs: Knobs) -> int:
        """The compressed windows."""
        assert isinstance(problem, ConvProblem)
        return layout(problem).size_bytes

    def estimate_us(self, problem: Problem, knobs: Knobs, target: Target) -> float:
        """The time of compression and thread blocks, and of the remaining products or, with few blocks, the longest of them.

        Fitted to VGG-19's layers on an H100 at 14 to 96 % zeros: within a third (bench/zeroskip/zeroskip.py).
        """
        del target
        assert isinstance(problem, ConvProblem)
        left = 1 - (sparsity_percent(knobs) or 0) / 100
        pool = problem.epilogue.pool or _ONE
        windows = problem.n * problem.p * problem.q * problem.reduction_length
        block_k = knobs.integer("block_k")
        blocks = problem.y_spec.elements / problem.k / pixels_of(block_k) * -(-problem.k // block_k)
        chain = problem.reduction_length * pool.window_h * pool.window_w * _STEP_US
        products = max(problem.flops / _FLOPS_US, chain)
        return _START_US + windows / _COMPRESSED_US + blocks * _BLOCK_US + left * products

    def build(self, problem: Problem, knobs: Knobs, target: Target) -> Executable:
        """Compile both kernels."""
        assert isinstance(problem, ConvProblem)
        return EcrExecutable(self.id, problem, knobs, target)


ENGINE = EcrEngine()
