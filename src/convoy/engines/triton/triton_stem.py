"""triton.stem: the first layer, few channels and a wide filter, on the swap-AB kernel (docs/kernels/first-layers.md).

A row of filter taps over a few channels is one contiguous window of the image: with channels padded to a vector of 16 bytes (or
to a part of it that the stride makes whole), the windows of neighbouring outputs are a TMA descriptor with overlapping rows, and
the convolution is one with filters r x 1 over window-many channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from convoy.engines.base import Buffers, Engine, Executable, Packed
from convoy.engines.gpu.device_tensors import checked, descriptor, scratch
from convoy.engines.gpu.gpu_support_checks import first_layer_support
from convoy.engines.triton.igemm_swap_ab_launch import TritonSwapABExecutable, workspace_bytes
from convoy.engines.triton.triton_build import KernelBuild, TritonKernel, interpreting
from convoy.engines.triton.triton_igemm_swap_ab import tensor_support, tile_space
from convoy.engines.triton.triton_tiles import ConvView, TritonTile, estimate_us
from convoy.problem import ConvProblem, Knobs, Problem
from convoy.problem.spec import DTYPE_BYTES
from convoy.support import Support
from convoy.target import Target

_MOST_CHANNELS = 4
_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class Padded:
    """The padded image: `rows` x `columns` pixels of `vector` channels; a window is `window` elements long."""

    rows: int
    columns: int
    vector: int
    window: int

    @staticmethod
    def of(problem: ConvProblem) -> Padded:
        """Sizes for a problem: rows a multiple of the stride, every window inside its row, rows of whole 16 bytes."""
        each = DTYPE_BYTES[problem.x_dtype]
        vector = next(v for v in (4, 8) if problem.stride_w * v * each % 16 == 0)
        window = max(16, 1 << (problem.s * vector - 1).bit_length())
        rows = (problem.p - 1) * problem.stride_h + problem.r
        elements = (problem.q - 1) * problem.stride_w * vector + window
        columns = -(-elements // vector)
        columns += columns % 2
        return Padded(-(-rows // problem.stride_h) * problem.stride_h, columns, vector, window)

    def bytes(self, problem: ConvProblem) -> int:
        """Bytes of all padded images, up to a multiple of 256."""
        size = problem.n * self.rows * self.columns * self.vector * DTYPE_BYTES[problem.x_dtype]
        return -(-size // 256) * 256


def stem_view(problem: ConvProblem) -> ConvView:
    """The convolution over windows."""
    padded = Padded.of(problem)
    return ConvView(
        problem.n, padded.rows, problem.q, padded.window, problem.k, problem.p, problem.q, problem.r, 1,
        stride_h=problem.stride_h, bytes_each=DTYPE_BYTES[problem.x_dtype],
    )  # fmt: skip


class TritonStemExecutable(TritonSwapABExecutable):
    """Pad, then multiply."""

    def __init__(self, engine: str, problem: ConvProblem, tile: TritonTile, target: Target) -> None:
        self.problem, self.padded = problem, Padded.of(problem)
        super().__init__(engine, stem_view(problem), tile, problem.x_dtype, problem.epilogue, target)
        self.partial_bytes = self.workspace_bytes
        if self.view.pixels == 0:
            return
        self.workspace_bytes += self.padded.bytes(problem)
        from convoy.engines.triton.kernels.stem_kernel import pad_image  # pyright: ignore[reportUnknownVariableType]

        dependent = not interpreting()
        signature = {"x": f"*{problem.x_dtype}", "padded": f"*{problem.x_dtype}"}
        signature |= dict.fromkeys(("h", "width", "rows", "row_elements", "pad_h", "pad_w"), "i32")
        constants = {"C": problem.c, "VECTOR": self.padded.vector, "BLOCK": _BLOCK, "WAIT": dependent}
        build = KernelBuild(
            engine, pad_image, signature, constants, ["x", "padded"], dependent=dependent, tensor_cores=False
        )
        self.pad = TritonKernel(build, target)

    def pack(self, constants: Sequence[torch.Tensor]) -> Packed:
        """The weight as filters over windows: [k, window, r, 1]."""
        weight = constants[0]
        k, c, r, s = weight.shape
        wide = torch.nn.functional.pad(weight.permute(0, 2, 3, 1), (0, self.padded.vector - c)).reshape(k, r, -1)
        wide = torch.nn.functional.pad(wide, (0, self.padded.window - s * self.padded.vector))
        return super().pack([wide.permute(0, 2, 1)[..., None], *constants[1:]])

    def x_descriptor(self, x: torch.Tensor) -> Any:
        """Overlapping windows over the padded image."""
        view, padded = self.view, self.padded
        row, step = padded.columns * padded.vector, self.problem.stride_w * padded.vector
        image = padded.rows * row
        if not view.strided:
            return descriptor(x, [view.n, view.h, view.q, view.c], self.x_box, [image, row, step, 1])
        shape = [view.n, view.h // view.stride_h, view.stride_h, view.q, view.c]
        return descriptor(x, shape, self.x_box, [image, view.stride_h * row, row, step, 1])

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        """Two launches, or three where the reduction is split."""
        problem, padded = self.problem, self.padded
        if self.view.pixels == 0:
            return
        x, _, _ = checked(buffers, problem.epilogue.residual, slices=True)
        room = scratch(workspace, self.workspace_bytes)
        assert room is not None
        size = padded.bytes(problem)
        image = room[:size].view(x.dtype)
        row = padded.columns * padded.vector
        sizes = [problem.h, problem.w, padded.rows, row, problem.pad_h, problem.pad_w]
        self.pad((problem.n * padded.rows, -(-row // _BLOCK), 1), [x, image, *sizes])
        self.multiply(image, buffers, room[size : size + self.partial_bytes] if self.partial_bytes else None)


class TritonStemEngine(Engine):
    """Windows of a padded image; see `kernels/stem_kernel.py` and `kernels/igemm_swap_ab_kernel.py`."""

    id = "triton.stem"
    family = "implicit_gemm"
    devices = ("cuda",)
    writes_slices = True
    trusted = False

    def supports(self, problem: Problem, target: Target) -> Support:
        """At most four channels, no groups, no dilation, on Hopper; fp32 as TF32 where the numerics allow."""
        if not (found := first_layer_support(problem, target, _MOST_CHANNELS, empty=True)):
            return found
        assert isinstance(problem, ConvProblem)
        return tensor_support(stem_view(problem))

    def space(self, problem: Problem, target: Target) -> Sequence[Knobs]:
        """Tiles by rising estimated time."""
        assert isinstance(problem, ConvProblem)
        return [tile.knobs for tile in tile_space(stem_view(problem), target)]

    def workspace_bytes(self, problem: Problem, knobs: Knobs) -> int:
        """The padded image, and the partial sums of a split reduction."""
        assert isinstance(problem, ConvProblem)
        view = stem_view(problem)
        return workspace_bytes(view, TritonTile.of(knobs)) + Padded.of(problem).bytes(problem) if view.pixels else 0

    def estimate_us(self, problem: Problem, knobs: Knobs, target: Target) -> float:
        """The tiles' cost model, and writing and reading the padded image; dearer than both by what 38 rows of an H200 say."""
        assert isinstance(problem, ConvProblem)
        copied = Padded.of(problem).bytes(problem) / 3.1e6
        return 1.35 * (estimate_us(stem_view(problem), TritonTile.of(knobs), target.units) + 1.0 + copied)

    def build(self, problem: Problem, knobs: Knobs, target: Target) -> Executable:
        """Compile one tile."""
        assert isinstance(problem, ConvProblem)
        return TritonStemExecutable(self.id, problem, TritonTile.of(knobs), target)


ENGINE = TritonStemEngine()
