"""triton.depthwise_gradients: both gradients of convolutions of one filter a channel, NHWC (docs/kernels/depthwise.md)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from convoy.engines.base import Buffers, Engine, Executable
from convoy.engines.gpu.device_tensors import as_floats, dense_nhwc, scratch, vector
from convoy.engines.gpu.gpu_support_checks import conv_support
from convoy.engines.triton.triton_build import KernelBuild, TritonKernel, interpreting
from convoy.errors import LaunchError
from convoy.problem import DTYPE_BYTES, ConvProblem, Knobs, Problem
from convoy.support import Support
from convoy.target import Target

_LARGEST_FILTER = 49
_TAPS = 9
"""Taps that one program of the weight gradient sums: a 3x3 filter's, in registers of their own."""

_ARRANGED = 128
"""Channels of a program that arranges the weight."""

MOST_PARTS = 512
_ADDED = 16
"""Parts that the last kernel adds at a time."""

_LAUNCH_US, _BYTES_US, _CACHE_US = 1.5, 2.6e6, 7e6
"""Microseconds of a launch, and bytes per microsecond from memory and through an H100's L1 caches (estimates, not yet fitted)."""


class _DepthwiseGradient(Executable):
    """Shared by both directions."""

    def __init__(self, problem: ConvProblem, knobs: Knobs, target: Target) -> None:
        self.problem = problem
        self.block_p, self.block_c = knobs.integer("block_p"), knobs.integer("block_c")
        self._warps = knobs.integer("warps")
        self._waits = target.capability >= 90 and not interpreting()
        self.columns = -(-problem.c // self.block_c)

    def _shape(self) -> dict[str, Any]:
        """Constants of a tile, and of the walk over a filter."""
        problem = self.problem
        return {
            "S": problem.s, "STRIDE_H": problem.stride_h, "STRIDE_W": problem.stride_w, "DILATION_H": problem.dilation_h,
            "DILATION_W": problem.dilation_w, "BLOCK_P": self.block_p, "BLOCK_C": self.block_c,
            "VECTOR": vector(problem.c), "WAIT": self._waits,
        }  # fmt: skip

    def _result(self, name: str, buffers: Buffers) -> torch.Tensor:
        (result,) = buffers.results
        if result is None:
            raise LaunchError(f"{name}: no tensor was given to write to")
        return dense_nhwc(name, result)


class DepthwiseDgradExecutable(_DepthwiseGradient):
    """The weight arranged, and one tile of the data gradient's kernel."""

    def __init__(self, engine: str, problem: ConvProblem, knobs: Knobs, target: Target) -> None:
        super().__init__(problem, knobs, target)
        self.taps = problem.r * problem.s
        self.workspace_bytes = 4 * self.taps * problem.c
        if problem.x_spec.elements and problem.y_spec.elements:
            from convoy.engines.triton.kernels.depthwise_gradients_kernels import arrange_weight, depthwise_dgrad  # pyright: ignore[reportUnknownVariableType]

            images = f"*{problem.x_dtype}"
            first = {"w": images, "arranged": "*fp32", "c": "i32", "taps": "i32"}
            shape = {"BLOCK_C": _ARRANGED, "VECTOR": vector(problem.c), "WAIT": self._waits}
            self.arrange = TritonKernel(
                KernelBuild(engine, arrange_weight, first, shape, ["arranged"], 4, 1, self._waits, tensor_cores=False),
                target,
            )
            sizes = dict.fromkeys(("pixels", "h", "width", "p", "q", "c", "pad_h", "pad_w"), "i32")
            signature = {"dy": images, "w": "*fp32", "dx": images, **sizes}
            self.kernel = TritonKernel(
                KernelBuild(
                    engine, depthwise_dgrad, signature, {"R": problem.r, **self._shape()}, ["dy", "w", "dx"],
                    self._warps, 1, self._waits, tensor_cores=False,
                ),
                target,
            )  # fmt: skip

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        """Two launches."""
        problem = self.problem
        dx = self._result("dx", buffers)
        if not dx.numel() or not problem.y_spec.elements:
            dx.zero_()
            return
        dy, weight = dense_nhwc("dy", buffers.args[0]), buffers.args[1]
        held = scratch(workspace, self.workspace_bytes)
        if held is None or not weight.flatten(1).is_contiguous():
            raise LaunchError("weight: its filters do not lie one after another")
        arranged = as_floats(held, self.taps * problem.c)
        channels, pixels = problem.c // vector(problem.c), problem.n * problem.h * problem.w
        self.arrange((-(-problem.c // _ARRANGED), self.taps, 1), [weight, arranged, channels, self.taps])
        sizes = [pixels, problem.h, problem.w, problem.p, problem.q, channels, problem.pad_h, problem.pad_w]
        self.kernel((-(-pixels // self.block_p), self.columns, 1), [dy, arranged, dx, *sizes])


class DepthwiseWgradExecutable(_DepthwiseGradient):
    """Sums over parts of the pixels, and their sum."""

    def __init__(self, engine: str, problem: ConvProblem, knobs: Knobs, target: Target) -> None:
        super().__init__(problem, knobs, target)
        self.taps = problem.r * problem.s
        self.parts = knobs.integer("parts")
        self.workspace_bytes = 4 * self.parts * self.taps * problem.c
        if problem.x_spec.elements and problem.y_spec.elements:
            from convoy.engines.triton.kernels.depthwise_gradients_kernels import add_parts, depthwise_wgrad  # pyright: ignore[reportUnknownVariableType]

            images = f"*{problem.x_dtype}"
            names = ("pixels", "each", "h", "width", "p", "q", "c", "taps", "pad_h", "pad_w")
            signature = {"x": images, "dy": images, "parts": "*fp32", **dict.fromkeys(names, "i32")}
            self.sums = TritonKernel(
                KernelBuild(
                    engine, depthwise_wgrad, signature, self._shape(), ["x", "dy", "parts"], self._warps, 1, self._waits,
                    tensor_cores=False,
                ),
                target,
            )  # fmt: skip
            last = {"parts": "*fp32", "dw": images, **dict.fromkeys(("programs", "c", "taps"), "i32")}
            shape = {"PARTS": _ADDED, "BLOCK_C": self.block_c, "VECTOR": vector(problem.c), "WAIT": self._waits}
            self.rest = TritonKernel(
                KernelBuild(engine, add_parts, last, shape, ["parts"], 4, 1, self._waits, tensor_cores=False),
                target,
            )

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        """Two launches."""
        problem = self.problem
        (dw,) = buffers.results
        if dw is None or not dw.flatten(1).is_contiguous():
            raise LaunchError("dw: no dense tensor was given to write to")
        if not problem.x_spec.elements or not problem.y_spec.elements:
            dw.zero_()
            return
        x, dy = (dense_nhwc(name, t) for name, t in zip(("x", "dy"), buffers.args, strict=True))
        held = scratch(workspace, self.workspace_bytes)
        assert held is not None
        parts = as_floats(held, self.workspace_bytes // 4)
        pixels, channels = problem.n * problem.p * problem.q, problem.c // vector(problem.c)
        sizes = [
            pixels, -(-pixels // self.parts), problem.h, problem.w, problem.p, problem.q, channels, self.taps, problem.pad_h,
            problem.pad_w,
        ]  # fmt: skip
        self.sums((self.parts, self.columns, -(-self.taps // _TAPS)), [x, dy, parts, *sizes])
        self.rest((self.columns, self.taps, 1), [parts, dw, self.parts, channels, self.taps])


def parts_of(problem: ConvProblem, block_p: int, block_c: int, wanted: int) -> int:
    """Programs along the pixels: as many as fill the GPU, each with at least one tile of pixels."""
    columns = -(-problem.c // block_c) * -(-problem.r * problem.s // _TAPS)
    return max(1, min(MOST_PARTS, wanted // columns, -(-problem.n * problem.p * problem.q // block_p)))


class DepthwiseGradients(Engine):
    """Data and weight gradients; see `kernels/depthwise_gradients.py`."""

    id = "triton.depthwise_gradients"
    family = "direct"
    devices = ("cuda",)
    trusted = False

    def supports(self, problem: Problem, target: Target) -> Support:
        """As many groups as channels; at most 49 taps. fp32 is exact."""
        direction = problem.direction if isinstance(problem, ConvProblem) else ""
        if direction not in ("dgrad", "wgrad"):
            return Support.no("computes directions dgrad and wgrad only")
        if not (found := conv_support(problem, target, 80, direction)):
            return found
        assert isinstance(problem, ConvProblem)
        if not problem.is_depthwise or problem.k != problem.c:
            return Support.no(f"needs groups = c = k, got {problem.groups}, {problem.c} and {problem.k}")
        if problem.epilogue:
            return Support.no(f"has no epilogue, got {problem.epilogue}")
        if problem.r * problem.s > _LARGEST_FILTER:
            return Support.no(f"needs at most {_LARGEST_FILTER} taps, got {problem.r} x {problem.s}")
        return Support.yes()

    def space(self, problem: Problem, target: Target) -> Sequence[Knobs]:
        """Tiles of 512 to 2048 values; for weights such that a thread holds 4 or 8 places, with nine sums for each."""
        assert isinstance(problem, ConvProblem)
        widths = _widths(problem)
        if problem.direction == "dgrad":
            found = [
                Knobs.of(block_p=values // block_c, block_c=block_c, warps=warps)
                for values, warps in ((1024, 4), (512, 2), (2048, 4), (1024, 2))
                for block_c in widths
            ]
        else:
            tiles = [
                (values * 32 * warps // block_c, block_c, warps)
                for values, warps in ((8, 4), (8, 2), (4, 4), (8, 8))
                for block_c in widths
            ]
            found = [
                Knobs.of(block_p=p, block_c=c, warps=warps, parts=parts_of(problem, p, c, waves * target.units))
                for p, c, warps in tiles
                for waves in (2, 4, 8)
            ]
        return sorted(dict.fromkeys(found), key=lambda knobs: self.estimate_us(problem, knobs, target))

    def workspace_bytes(self, problem: Problem, knobs: Knobs) -> int:
        """A weight gradient's parts; for a data gradient the weight as its kernel wants it."""
        assert isinstance(problem, ConvProblem)
        parts = knobs.integer("parts") if problem.direction == "wgrad" else 1
        return 4 * parts * problem.r * problem.s * problem.c

    def estimate_us(self, problem: Problem, knobs: Knobs, target: Target) -> float:
        """Each tap of a pixel is a load, but where a stride has none; a weight gradient's parts are written and read."""
        assert isinstance(problem, ConvProblem)
        taps, block_c = problem.r * problem.s, knobs.integer("block_c")
        if problem.direction == "dgrad":
            loads = problem.x_spec.elements * taps / (problem.stride_h * problem.stride_w)
            return 2 * _LAUNCH_US + _guess_us(problem, loads, block_c)
        groups, parts = -(-taps // _TAPS), knobs.integer("parts")
        busy = min(1.0, parts * groups * -(-problem.c // block_c) / max(1, target.units))
        added = 2 * 4 * parts * taps * problem.c / _BYTES_US
        loads = problem.y_spec.elements * (taps + groups)
        guess = 2 * _LAUNCH_US + _guess_us(problem, loads, block_c) / max(busy, 1e-3) + added
        return max(guess, 2.5 * guess - 3.2)  # fitted to 38 rows of an H200 (error 20 %)

    def build(self, problem: Problem, knobs: Knobs, target: Target) -> Executable:
        """Compile a direction's kernels."""
        assert isinstance(problem, ConvProblem)
        made = DepthwiseDgradExecutable if problem.direction == "dgrad" else DepthwiseWgradExecutable
        return made(self.id, problem, knobs, target)


def _guess_us(problem: ConvProblem, loads: float, block_c: int) -> float:
    """Bytes from memory, and loads of one value each through the first-level cache, which wants lines of 128 bytes."""
    narrow = 1.15 if block_c * DTYPE_BYTES[problem.x_dtype] < 128 else 1.0
    waste = -(-problem.c // block_c) * block_c / max(1, problem.c)
    return max(problem.bytes_min / _BYTES_US, loads * DTYPE_BYTES[problem.x_dtype] * waste * narrow / _CACHE_US)


def _widths(problem: ConvProblem) -> list[int]:
    """Channels of a tile: at least 64 bytes, and at most all channels."""
    most = max(32, min(128, 1 << (problem.c - 1).bit_length()))
    return list(dict.fromkeys((min(64, most), 32, most)))


ENGINE = DepthwiseGradients()
