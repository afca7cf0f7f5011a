"""Executables whose last launch also writes marks of the result, so that a reader that skips zeros need not search for them.

The ReLU that makes the zeros is in the epilogue of the kernel that writes them, or in the launch that adds the parts of a
split sum. Both have every value in registers, so that marks cost a maximum over them and a few words of memory
(`kernels/nonzero_marks.py`).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from convoy.engines.base import Buffers
from convoy.engines.triton.igemm_swap_ab_launch import TritonSwapABExecutable
from convoy.engines.triton.triton_build import KernelBuild, TritonKernel, interpreting
from convoy.errors import CompileError
from convoy.problem import TensorSpec
from convoy.target import Target

UNMARKED = {"marks": None, "MARK_P": 0, "MARK_Q": 0, "MARK_K": 0}
"""Constants of a kernel that writes no marks."""

MOST_MARKS = 8192
"""Words of marks, at most: every thread block of the reader's first launch reads them all."""

_SLICES = 128
_BLOCK_PIXELS = 64
_BLOCKS = 384


def mark_slices(n: int, pixels: int, channels: int) -> int:
    """Slices of an image's pixels that a thread block looks at each: about as many blocks as a large GPU has places."""
    blocks = n * -(-channels // 32)
    return max(1, min(_SLICES, -(-pixels // 8), -(-_BLOCKS // blocks)))


def block_pixels(pixels: int, slices: int) -> int:
    """Pixels that such a block has on its way at once."""
    return min(_BLOCK_PIXELS, 1 << max(0, -(-pixels // slices) - 1).bit_length())


class MarkingExecutable(TritonSwapABExecutable):
    """A kernel of fp32 results; where a launch is given a second result, marks of the first go there."""

    target: Target
    marking: TritonKernel | None = None

    def marks_written(self) -> TensorSpec | None:
        """The marks' shape; None if tiles are not whole words of channels or span images, or the kernel would be slow."""
        view, tile = self.view, self.tile
        if view.pixels == 0 or tile.block_k % 32 or view.h == view.p == 1:
            return None
        if self.marking is None:
            try:
                self.marking = TritonKernel(self._marking_build(), self.target)
            except CompileError:  # it spills: a reader that looks is faster
                return None
        return TensorSpec((2, view.n * self.slices_written, -(-view.k // 32)), "i32")

    @property
    def slices_written(self) -> int:
        """Slices of an image in the marks: tiles, or blocks of the launch that adds the parts."""
        view = self.view
        if self.splits > 1:
            return mark_slices(view.n, view.p * view.q, view.k)
        _, _, tiles_h, tiles_w = self.tile.tiles(view)
        return tiles_h * tiles_w

    def _marking_build(self) -> KernelBuild:
        view, fused = self.view, self.epilogue
        if self.splits == 1:
            build = self.kernel.build
            marked = {**build.constants, "MARK_P": view.p, "MARK_Q": view.q, "MARK_K": view.k}
            marked.pop("marks", None)
            return replace(build, signature={**build.signature, "marks": "*i32"}, constants=marked)
        from convoy.engines.triton.kernels.nonzero_marks import reduce_marking  # pyright: ignore[reportUnknownVariableType]

        dependent = not interpreting()
        signature = {
            "partial": "*fp32", "y": "*fp32", "residual": "*fp32" if fused.residual else "none",
            "bias": "*fp32" if fused.bias else "none", "marks": "*i32",
        } | dict.fromkeys(("pixels", "k", "words", "images"), "i32")  # fmt: skip
        constants: dict[str, Any] = {
            "SPLITS": self.splits, "BLOCK_P": block_pixels(view.p * view.q, self.slices_written),
            "ACTIVATION": fused.activation, "WAIT": dependent,
        }  # fmt: skip
        even = ["partial", "y", "residual", "bias", *(["k"] if view.k % 16 == 0 else [])]
        engine = self.kernel.build.engine
        return KernelBuild(engine, reduce_marking, signature, constants, even, dependent=dependent, tensor_cores=False)

    def run_product(self, arguments: list[Any], buffers: Buffers) -> None:
        """The product, with marks where it writes the result itself and has a place for them."""
        grid = (math.prod(self.tile.tiles(self.view)), self.splits, 1)
        if self.splits == 1 and len(buffers.results) > 1 and self.marking is not None:
            self.marking(grid, [*arguments, buffers.results[1]])
        else:
            self.kernel(grid, arguments)

    def add_parts(
        self, sums: torch.Tensor, y: torch.Tensor, residual: torch.Tensor | None, bias: torch.Tensor | None,
        buffers: Buffers,
    ) -> None:  # fmt: skip
        """The sum of the parts, with marks where there is a place for them."""
        if len(buffers.results) < 2 or self.marking is None:
            super().add_parts(sums, y, residual, bias, buffers)
            return
        view = self.view
        words = -(-view.k // 32)
        arguments = [sums, y, residual, bias, buffers.results[1], view.p * view.q, view.k, words, view.n]
        self.marking((self.slices_written, words, view.n), arguments)
