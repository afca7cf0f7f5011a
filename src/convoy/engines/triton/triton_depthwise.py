"""triton.depthwise: one filter a channel, NHWC, memory-bound (docs/kernels/depthwise.md)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from convoy.engines.base import Buffers, Engine, Executable, Packed
from convoy.engines.gpu.device_tensors import checked, vector
from convoy.engines.gpu.gpu_support_checks import conv_support
from convoy.engines.triton.triton_build import KernelBuild, TritonKernel, interpreting
from convoy.problem import ConvProblem, Knobs, Problem
from convoy.support import Support
from convoy.target import Target

_SIZES = ("p", "q", "h", "width", "c", "tiles_c", "tiles_w", "tiles_h", "pad_h", "pad_w")
_LARGEST_FILTER = 49
"""Taps are unrolled: more than a 7x7 filter would make code too long to be worth it."""


class TritonDepthwiseExecutable(Executable):
    """One tile of the depthwise kernel for one problem."""

    def __init__(self, engine: str, problem: ConvProblem, knobs: Knobs, target: Target) -> None:
        self.problem = problem
        self.block = tuple(knobs.integer(name) for name in ("block_h", "block_w", "block_c"))
        if problem.y_spec.elements:
            dependent = bool(knobs["pdl"]) and target.capability >= 90 and not interpreting()
            self.kernel = TritonKernel(self._build(engine, knobs.integer("warps"), dependent), target)

    def _build(self, engine: str, warps: int, dependent: bool) -> KernelBuild:
        from convoy.engines.triton.kernels.depthwise_kernel import depthwise_conv  # pyright: ignore[reportUnknownVariableType]

        problem, dtype = self.problem, self.problem.x_dtype
        signature = {
            "x": f"*{dtype}", "w": "*fp32", "y": f"*{dtype}",
            "residual": f"*{dtype}" if problem.epilogue.residual else "none",
            "bias": f"*{dtype}" if problem.epilogue.bias else "none",
        } | dict.fromkeys(_SIZES, "i32")  # fmt: skip
        constants: dict[str, Any] = {
            "R": problem.r, "S": problem.s, "STRIDE_H": problem.stride_h, "STRIDE_W": problem.stride_w,
            "DILATION_H": problem.dilation_h, "DILATION_W": problem.dilation_w, "BLOCK_H": self.block[0],
            "BLOCK_W": self.block[1], "BLOCK_C": self.block[2], "VECTOR": vector(problem.c),
            "ACTIVATION": problem.epilogue.activation, "WAIT": dependent,
        }  # fmt: skip
        divisible = ["x", "w", "y", "residual", "bias"]
        return KernelBuild(
            engine, depthwise_conv, signature, constants, divisible, warps, 1, dependent, tensor_cores=False
        )

    def pack(self, constants: Sequence[torch.Tensor]) -> Packed:
        """The weight as fp32 [r·s, c]: read once a tile, no conversion in the loop."""
        weight = constants[0].float().reshape(self.problem.c, -1).t().contiguous()
        return (weight, *(b.contiguous() for b in constants[1:]))

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        """One launch."""
        del workspace
        problem = self.problem
        if not problem.y_spec.elements:
            return
        x, y, residual = checked(buffers, problem.epilogue.residual)
        weight, bias = buffers.constants[0], buffers.constants[1] if problem.epilogue.bias else None
        tiles_h, tiles_w, tiles_c = (
            -(-size // block) for size, block in zip((problem.p, problem.q, problem.c), self.block, strict=True)
        )
        sizes = [
            problem.p, problem.q, problem.h, problem.w, problem.c // vector(problem.c), tiles_c, tiles_w, tiles_h,
            problem.pad_h, problem.pad_w,
        ]  # fmt: skip
        self.kernel((problem.n * tiles_h * tiles_w * tiles_c, 1, 1), [x, weight, y, residual, bias, *sizes])


class TritonDepthwiseEngine(Engine):
    """Direct depthwise convolution; see `kernels/depthwise.py`."""

    id = "triton.depthwise"
    family = "direct"
    devices = ("cuda",)
    trusted = False
    pure_space = True

    def supports(self, problem: Problem, target: Target) -> Support:
        """As many groups as input and output channels; at most 49 taps. fp32 is exact."""
        if not (found := conv_support(problem, target, 80)):
            return found
        assert isinstance(problem, ConvProblem)
        if not problem.is_depthwise or problem.k != problem.c:
            return Support.no(f"needs groups = c = k, got {problem.groups}, {problem.c} and {problem.k}")
        if problem.r * problem.s > _LARGEST_FILTER:
            return Support.no(f"needs at most {_LARGEST_FILTER} taps, got {problem.r} x {problem.s}")
        return Support.yes()

    def space(self, problem: Problem, target: Target) -> Sequence[Knobs]:
        """Small tiles where there is little work, larger ones where there is much."""
        assert isinstance(problem, ConvProblem)
        found: list[tuple[float, Knobs]] = []
        for block_c in (32, 64, 128):
            for block_h, block_w in ((1, 4), (1, 8), (2, 4), (2, 8), (4, 4), (4, 8)):
                for warps in (1, 2, 4):
                    elements = block_c * block_h * block_w / (32 * warps)
                    if elements not in (8, 16, 32) or (block_c > 32 and block_c >= 2 * problem.c):
                        continue
                    for pdl in (False, True):
                        knobs = Knobs.of(block_h=block_h, block_w=block_w, block_c=block_c, warps=warps, pdl=pdl)
                        found.append((self.estimate_us(problem, knobs, target), knobs))
        found.sort(key=lambda pair: pair[0])
        return [knobs for _, knobs in found[:24]]

    def estimate_us(self, problem: Problem, knobs: Knobs, target: Target) -> float:
        """Bytes from memory, loads through the first-level cache, and how evenly the tiles fall on the device."""
        assert isinstance(problem, ConvProblem)
        block_h, block_w, block_c = (knobs.integer(name) for name in ("block_h", "block_w", "block_c"))
        tiles = problem.n * -(-problem.p // block_h) * -(-problem.q // block_w) * -(-problem.c // block_c)
        a_tile = block_h * block_w * block_c * problem.r * problem.s
        busy = tiles / max(1, target.units) * a_tile * 2 / 128 / 1700
        chain = a_tile / (32 * knobs.integer("warps")) * 0.004
        # Three times what loads and bytes alone would take: fitted to 93 rows of an H200 (30 %).
        return 1.3 + 3.0 * (max(busy, problem.bytes_min / 3.1e6) + chain) - 0.1 * bool(knobs["pdl"])

    def build(self, problem: Problem, knobs: Knobs, target: Target) -> Executable:
        """Compile one tile."""
        assert isinstance(problem, ConvProblem)
        return TritonDepthwiseExecutable(self.id, problem, knobs, target)


ENGINE = TritonDepthwiseEngine()
