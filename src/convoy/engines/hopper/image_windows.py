"""A copy of a first layer's image in which each window is contiguous, for `triton.stem_wgrad` (docs/kernels/first-layers.md)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import torch

from convoy.engines.hopper.nvrtc_kernel import Function, compile_cubin, pointer, structure
from convoy.engines.hopper.nvrtc_source import CudaSource, kernel_source
from convoy.problem import ConvProblem
from convoy.problem.spec import DTYPE_BYTES
from convoy.target import Target

MOST_CHANNELS: Final = 4
"""Most channels of an image that can be copied this way."""


@dataclass(frozen=True)
class Windows:
    """The layout of the copied image, and the convolution that remains.

    The copy is [n, groups, columns, rows of a group, vector]. A group holds `stride_h` rows, so the windows of an output row
    begin at a group; neighbouring windows are `stride_w` columns apart and overlap. The part of a window in one group is
    contiguous: it takes the place of the channels, and groups take the place of the filter's rows.
    """

    problem: ConvProblem

    @cached_property
    def vector(self) -> int:
        """Channels of the copy: 4, or 8 if windows would otherwise not begin at multiples of 16 bytes."""
        p = self.problem
        return 4 if p.stride_h * p.stride_w * 4 * DTYPE_BYTES[p.x_dtype] % 16 == 0 else 8

    @property
    def taps(self) -> int:
        """Groups that a window spans."""
        return -(-self.problem.r // self.problem.stride_h)

    @property
    def groups(self) -> int:
        """Groups of an image."""
        return self.problem.p + self.taps - 1

    @property
    def columns(self) -> int:
        """Columns of a row, a multiple of the stride."""
        return (
            -(-((self.problem.q - 1) * self.problem.stride_w + self.problem.s) // self.problem.stride_w)
            * self.problem.stride_w
        )

    @property
    def cell(self) -> int:
        """Elements of one column of a group."""
        return self.problem.stride_h * self.vector

    @property
    def bytes(self) -> int:
        """Bytes of the copy."""
        p = self.problem
        return p.n * self.groups * self.columns * self.cell * DTYPE_BYTES[p.x_dtype]

    @cached_property
    def left(self) -> ConvProblem:
        """The convolution over the copy: windows as channels, filters of `taps` x 1, no stride and no padding."""
        p = self.problem
        return replace(
            p, c=p.s * self.cell, h=self.groups, w=p.q, r=self.taps, s=1, pad_h=0, pad_w=0, stride_h=1, stride_w=1
        )  # fmt: skip

    def parameters(self) -> dict[str, int]:
        """The values of `image_windows_config.cuh`."""
        p = self.problem
        return {
            "VALUE_BYTES": DTYPE_BYTES[p.x_dtype], "X_CHANNELS": p.c, "VECTOR": self.vector, "GROUP_ROWS": p.stride_h,
        }  # fmt: skip

    def source(self) -> CudaSource:
        """Source of the copying kernel."""
        return kernel_source("image_windows", self.parameters())

    def sizes(self) -> dict[str, int]:
        """The kernel's run-time sizes, in the order of its structure."""
        p = self.problem
        return {
            "groups": self.groups, "columns": self.columns, "h": p.h, "w": p.w, "pad_h": p.pad_h, "pad_w": p.pad_w,
        }  # fmt: skip

    @property
    def strides(self) -> tuple[int, int, int]:
        """Bytes from one window, group and image to the next."""
        p, each = self.problem, DTYPE_BYTES[self.problem.x_dtype]
        group = self.columns * self.cell * each
        return p.stride_w * self.cell * each, group, self.groups * group


class ImageCopy:
    """The copying kernel for one problem."""

    def __init__(self, engine: str, windows: Windows, target: Target) -> None:
        self.windows = windows
        cubin, self.log = compile_cubin(engine, windows.source(), target)
        self.function = Function(engine, cubin, "image_windows", 0)

    def launch(self, x: torch.Tensor, room: torch.Tensor) -> None:
        """Copy an image into the layout of windows."""
        windows = self.windows
        arguments = [pointer(x), pointer(room), structure("Sizes", windows.sizes())]
        blocks = windows.problem.n * windows.groups
        self.function.launch(x.device.index or 0, blocks, 256, arguments, dependent=True)
