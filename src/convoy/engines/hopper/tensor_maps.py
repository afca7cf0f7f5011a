"""TMA descriptors of x, y and the weight as plain numbers, which `encode` turns into the driver's tensor maps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from convoy.engines.compilers.cuda_bindings import driver
from convoy.errors import LaunchError
from convoy.problem import ConvProblem
from convoy.problem.spec import DTYPE_BYTES

ROW_BYTES = 128
"""Bytes of a tile's row, one pixel's block of channels: the span of the widest swizzle."""


@dataclass(frozen=True, slots=True)
class PixelMap:
    """x[n, h, w, c] in im2col mode: sizes (innermost first), strides in bytes, the box of base pixels, pixels of one copy.

    `low` and `high` are the corners (w, h) of the positions of a filter's first tap, relative to the image's first and last
    pixel; `step` is the convolution's stride. See cuTensorMapEncodeIm2col in the CUDA Driver API.
    """

    sizes: tuple[int, int, int, int]
    strides: tuple[int, int, int]
    low: tuple[int, int]
    high: tuple[int, int]
    step: tuple[int, int]
    rows: int
    channels: int

    @staticmethod
    def of(problem: ConvProblem, rows: int) -> PixelMap:
        """The descriptor for copies of `rows` pixels."""
        each = DTYPE_BYTES[problem.x_dtype]
        n, c, h, w = problem.x_spec.shape
        return PixelMap(
            (c, w, h, n), (c * each, w * c * each, h * w * c * each),
            (-problem.pad_w, -problem.pad_h),
            (problem.pad_w - (problem.s - 1) * problem.dilation_w, problem.pad_h - (problem.r - 1) * problem.dilation_h),
            (problem.stride_w, problem.stride_h), rows, ROW_BYTES // each,
        )  # fmt: skip

    def fits(self, problem: ConvProblem) -> bool:
        """Whether TMA can encode it: corners in a signed byte, tap offsets in an unsigned byte, strides up to 8."""
        corners = all(-128 <= corner <= 127 for corner in (*self.low, *self.high))
        offsets = max((problem.s - 1) * problem.dilation_w, (problem.r - 1) * problem.dilation_h) <= 255
        return corners and offsets and max(self.step) <= 8 and self.rows <= 1024

    def encode(self, dtype: str, x: torch.Tensor) -> Any:
        """The driver's tensor map for a tensor; raises LaunchError if the driver refuses it."""
        cuda = driver()
        words, wide = cuda.cuuint32_t, cuda.cuuint64_t
        return _checked(
            cuda.cuTensorMapEncodeIm2col(
                _kind(dtype), 4, x.data_ptr(), [wide(v) for v in self.sizes], [wide(v) for v in self.strides],
                list(self.low), list(self.high), self.channels, self.rows,
                [words(1), words(self.step[0]), words(self.step[1]), words(1)], *_modes(),
            )
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class FilterMap:
    """The weight [k, r·s, c] in tiled mode: sizes (innermost first), strides in bytes, filters of one copy."""

    sizes: tuple[int, int, int]
    strides: tuple[int, int]
    rows: int
    channels: int

    @staticmethod
    def of(problem: ConvProblem, rows: int) -> FilterMap:
        """The descriptor for copies of `rows` filters."""
        each = DTYPE_BYTES[problem.weight_dtype]
        k, c, r, s = problem.weight_spec.shape
        return FilterMap((c, r * s, k), (c * each, r * s * c * each), rows, ROW_BYTES // each)

    def encode(self, dtype: str, weight: torch.Tensor) -> Any:
        """The driver's tensor map for a tensor; raises LaunchError if the driver refuses it."""
        cuda = driver()
        words, wide = cuda.cuuint32_t, cuda.cuuint64_t
        return _checked(
            cuda.cuTensorMapEncodeTiled(
                _kind(dtype), 3, weight.data_ptr(), [wide(v) for v in self.sizes], [wide(v) for v in self.strides],
                [words(v) for v in (self.channels, 1, self.rows)], [words(1)] * 3, *_modes(),
            )
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class BoxMap:
    """A tensor of four dimensions in tiled mode: sizes and box (innermost first), strides in bytes, swizzled or not."""

    sizes: tuple[int, int, int, int]
    strides: tuple[int, int, int]
    box: tuple[int, int, int, int]
    swizzled: bool = True

    def encode(self, dtype: str, tensor: torch.Tensor) -> Any:
        """The driver's tensor map for a tensor; raises LaunchError if the driver refuses it."""
        cuda = driver()
        words, wide = cuda.cuuint32_t, cuda.cuuint64_t
        return _checked(
            cuda.cuTensorMapEncodeTiled(
                _kind(dtype), 4, tensor.data_ptr(), [wide(v) for v in self.sizes], [wide(v) for v in self.strides],
                [words(v) for v in self.box], [words(1)] * 4, *_modes(swizzled=self.swizzled),
            )
        )  # fmt: skip


def _kind(dtype: str) -> Any:
    """TMA's data type; fp32 values are rounded to TF32 when they are copied."""
    names = {"fp16": "FLOAT16", "bf16": "BFLOAT16", "fp32": "TFLOAT32"}
    return getattr(driver().CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{names[dtype]}")


def _modes(*, swizzled: bool = True) -> tuple[Any, Any, Any, Any]:
    cuda = driver()
    swizzles = cuda.CUtensorMapSwizzle
    return (
        cuda.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        swizzles.CU_TENSOR_MAP_SWIZZLE_128B if swizzled else swizzles.CU_TENSOR_MAP_SWIZZLE_NONE,
        cuda.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
        cuda.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )


def _checked(answer: tuple[Any, ...]) -> Any:
    error, made = answer
    if int(error):
        raise LaunchError(f"cuda: the driver refused a tensor map: {error.name}")
    return made
