"""triton.stem_wgrad: the first layer's weight gradient, over windows of a rearranged image (docs/kernels/training.md)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from convoy.engines.base import Buffers, Engine, Executable
from convoy.engines.gpu.device_tensors import scratch
from convoy.engines.gpu.gpu_support_checks import first_layer_support
from convoy.engines.hopper.image_windows import MOST_CHANNELS, ImageCopy, Windows
from convoy.engines.hopper.nvrtc_kernel import absence
from convoy.engines.triton.triton_build import shared_limit
from convoy.engines.triton.triton_tiles import ConvView, conv_view
from convoy.engines.triton.triton_wgrad import WgradExecutable, asked
from convoy.engines.triton.triton_wgrad_tile import WgradTile, estimate_us, partial_bytes, wgrad_tiles, wgrad_view
from convoy.problem import ConvProblem, Knobs, Problem
from convoy.problem.spec import DTYPE_BYTES
from convoy.support import Support
from convoy.target import Target

_COPY_US = 1.5
_SCATTER_US = 2.0
_COPY_BYTES_US = 2.5e6


class StemWgradExecutable(Executable):
    """One tile for one problem: a copy of the image, the weight gradient over windows, and a scatter to the filter's layout."""

    def __init__(self, engine: str, problem: ConvProblem, share: WgradTile, target: Target) -> None:
        self.problem, self.windows = problem, Windows(problem)
        self.copy = ImageCopy(engine, self.windows, target)
        each = DTYPE_BYTES[problem.x_dtype]
        pixel, row, image = (stride // each for stride in self.windows.strides)
        view = windows_view(self.windows)
        self.product = WgradExecutable(engine, self.windows.left, share, target, view, (image, row, pixel))
        self.workspace_bytes = workspace_bytes(problem, share)

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        """The copy, the product in one or two launches, a copy for each row of a group; torch's sum over dy for the bias."""
        problem, windows = self.problem, self.windows
        x, dy, dweight = asked(problem, buffers)
        if problem.n == 0:
            dweight.zero_()
            return
        room = scratch(workspace, self.workspace_bytes)
        assert room is not None
        image, made, sums = _parts(problem, room)
        self.copy.launch(x, image)
        made = made.view(dweight.dtype)
        self.product.sum_products(image.view(x.dtype), dy, made, sums if self.product.workspace_bytes else None)
        k, c, r, s = dweight.shape
        found = made.view(k, windows.taps, s, problem.stride_h, windows.vector)
        for row in range(min(problem.stride_h, r)):
            rows = len(range(row, r, problem.stride_h))
            dweight[:, :, row :: problem.stride_h].copy_(found[:, :rows, :, row, :c].permute(0, 3, 1, 2))


def windows_view(windows: Windows) -> ConvView:
    """The remaining gradient on the copy; one row of pixels only if its windows are adjacent: most overlap or leave gaps."""
    left, p = windows.left, windows.problem
    dense = windows.taps == 1 and p.s == p.stride_w
    return wgrad_view(left) if dense else conv_view(left)


def _sizes(problem: ConvProblem) -> tuple[int, int]:
    """Bytes of the copy and of the gradient over windows, each a multiple of 256."""
    windows = Windows(problem)
    return -(-windows.bytes // 256) * 256, -(-windows.left.weight_spec.size_bytes // 256) * 256


def _parts(problem: ConvProblem, room: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The workspace as the copy, the gradient over windows, and the split sums."""
    image, made = _sizes(problem)
    exact = Windows(problem).left.weight_spec.size_bytes
    return room[:image], room[image : image + exact], room[image + made :]


def workspace_bytes(problem: ConvProblem, share: WgradTile) -> int:
    """The copy, the gradient over windows, and the split sums."""
    return sum(_sizes(problem)) + partial_bytes(windows_view(Windows(problem)), share) if problem.n else 0


class StemWgradEngine(Engine):
    """Weight gradients of first layers; see `kernels/gradient_kernels.py` and `cuda/stem.cu`."""

    id = "triton.stem_wgrad"
    family = "implicit_gemm"
    devices = ("cuda",)
    trusted = False
    quick_settings = 3

    def supports(self, problem: Problem, target: Target) -> Support:
        """At most four channels, no groups, no dilation, on Hopper; fp32 as TF32 where the numerics allow."""
        if not (found := first_layer_support(problem, target, MOST_CHANNELS, "wgrad", empty=False)):
            return found
        assert isinstance(problem, ConvProblem)
        if reason := absence():
            return Support.no(reason)
        whole = 16 // DTYPE_BYTES[problem.x_dtype]
        windows = Windows(problem)
        if problem.k % whole or windows.left.c % whole:
            return Support.no(f"needs k and windows as multiples of {whole}, got {problem.k} and {windows.left.c}")
        if windows.bytes >= 1 << 31:
            return Support.no("needs fewer images")
        return Support.yes()

    def space(self, problem: Problem, target: Target) -> Sequence[Knobs]:
        """Tiles by rising estimated time."""
        assert isinstance(problem, ConvProblem)
        return [
            share.knobs
            for share in wgrad_tiles(windows_view(Windows(problem)), target.units, shared=shared_limit(target))
        ]

    def workspace_bytes(self, problem: Problem, knobs: Knobs) -> int:
        """See `workspace_bytes`."""
        assert isinstance(problem, ConvProblem)
        return workspace_bytes(problem, WgradTile.of(knobs))

    def estimate_us(self, problem: Problem, knobs: Knobs, target: Target) -> float:
        """The cost model of `triton.wgrad`, and the copies."""
        assert isinstance(problem, ConvProblem)
        windows = Windows(problem)
        copied = _COPY_US + (windows.bytes + problem.x_spec.size_bytes) / _COPY_BYTES_US
        scattered = _SCATTER_US * min(problem.stride_h, problem.r)
        return estimate_us(windows_view(windows), WgradTile.of(knobs), target.units) + copied + scattered

    def build(self, problem: Problem, knobs: Knobs, target: Target) -> Executable:
        """Compile one tile."""
        assert isinstance(problem, ConvProblem)
        return StemWgradExecutable(self.id, problem, WgradTile.of(knobs), target)


ENGINE = StemWgradEngine()
