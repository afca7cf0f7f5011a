"""fp32 tensors as two planes of halves: x · s = high + low / 2048, s a power of two (docs/kernels/strict-fp32.md)."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import torch

from convoy.engines.gpu.device_tensors import as_floats
from convoy.engines.triton.marking_executables import MOST_MARKS
from convoy.engines.triton.triton_build import KernelBuild, TritonKernel, interpreting
from convoy.problem import TensorSpec
from convoy.target import Target

MAXIMA: Final = 512
_BLOCKS: Final = (1024, 2048, 4096)
"""Values that a thread block has on its way at once: large images are read in few steps, of small ones every block has some."""

AHEAD_BYTES: Final = 1 << 24
"""Bytes of weights that are prefetched, at most: a third of an H100's L2 cache, which holds the planes too."""

_HEADER_BYTES: Final = 4096
"""The maxima and 1 / s before the planes."""


def split_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """High, low (fp16) and 1 / s (fp32, one a filter) of a weight [k, c, r, s]: weight · s = high + low / 2048."""
    wide = weight.double()
    finite = torch.where(wide.isfinite(), wide.abs(), 0.0)
    largest = finite.flatten(1).amax(dim=1).clamp_min(2.0**-112)
    exponent = 14 - torch.floor(torch.log2(largest))
    scaled = wide * torch.exp2(exponent)[:, None, None, None]
    high = scaled.half()
    low = torch.where(high.isfinite(), (scaled - high.double()) * 2048, 0.0).half()
    return high, low, torch.exp2(-exponent).float()


def plane_bytes(elements: int) -> int:
    """Bytes of the header and of both planes of so many values, rounded up to a multiple of 256."""
    return _HEADER_BYTES + -(-4 * elements // 256) * 256


def split_us(elements: int) -> float:
    """Estimated time of splitting x: two launches, and 12 bytes a value through L2."""
    return 2.0 + 12 * elements / 4e6


class PlaneSplit:
    """Splits x: two launches (largest |x|, planes), or one where x has marks.

    Args:
        engine: whose launches they are.
        elements: of x, a multiple of 8, at least 8.
        target: the device.
    """

    def __init__(self, engine: str, elements: int, target: Target) -> None:
        from convoy.engines.triton.kernels.split_fp32_kernels import absolute_maxima, split_planes  # pyright: ignore[reportUnknownVariableType]

        self.elements, self.target = elements, target
        dependent = not interpreting()
        self.block = next((block for block in _BLOCKS if MAXIMA * block >= elements), _BLOCKS[-1])
        even = ["elements"] if elements % 16 == 0 else []
        self.maxima = TritonKernel(
            KernelBuild(
                engine, absolute_maxima,
                {"x": "*fp32", "maxima": "*fp32", "w_bytes": "*i8" if dependent else "none", "elements": "i32",
                 "weight_bytes": "i32"},
                {"BLOCK": self.block, "WAIT": dependent}, ["x", "maxima", "w_bytes", *even], dependent=dependent,
            ),
            target,
        )  # fmt: skip
        self.planes = TritonKernel(
            KernelBuild(
                engine, split_planes,
                {"x": "*fp32", "maxima": "*fp32", "inverse": "*fp32", "planes": "*fp16", "elements": "i32"},
                {"w_bytes": None, "weight_bytes": 0, "VALID": MAXIMA, "COUNT": MAXIMA, "BLOCK": self.block,
                 "WAIT": dependent},
                ["x", "maxima", "inverse", "planes", *even], dependent=dependent,
            ),
            target,
        )  # fmt: skip
        self.told: dict[int, TritonKernel] = {}

    def split(
        self, x: torch.Tensor, marks: torch.Tensor | None, weight: torch.Tensor, into: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Both planes of x, and 1 / s as a tensor of one value.

        Args:
            x: fp32.
            marks: marks of x, if the previous layer wrote them (`accept_marks`).
            weight: the next launch's weight, which is prefetched into L2 meanwhile.
            into: scratch of `plane_bytes` bytes, which holds the results.
        """
        maxima = as_floats(into, MAXIMA)
        inverse = into[_HEADER_BYTES // 2 :][:4].view(torch.float32)
        planes = into[_HEADER_BYTES:][: 4 * self.elements].view(torch.float16)
        ahead = min(weight.numel() * weight.element_size(), AHEAD_BYTES)
        grid, asked = (-(-self.elements // self.block), 1, 1), None if interpreting() else weight
        if marks is not None:
            maxima = marks[0].view(torch.float32)
            self.told[maxima.numel()](grid, [x, maxima, inverse, planes, asked, self.elements, ahead])
        else:
            self.maxima((MAXIMA, 1, 1), [x, maxima, asked, self.elements, ahead])
            self.planes(grid, [x, maxima, inverse, planes, self.elements])
        return planes, inverse

    def accept_marks(self, spec: TensorSpec) -> bool:
        """Takes the largest magnitudes from the marks, unless reading all marks would cost more than computing them."""
        _, lines, words = spec.shape
        count = lines * words
        if count > MOST_MARKS:
            return False
        if count not in self.told:
            plain, dependent = self.planes.build, not interpreting()
            signature = {**plain.signature, "w_bytes": "*i8" if dependent else "none", "weight_bytes": "i32"}
            constants = {n: v for n, v in plain.constants.items() if n not in ("w_bytes", "weight_bytes")}
            constants |= {"VALID": count, "COUNT": 1 << (count - 1).bit_length()}
            even = [*plain.divisible, "w_bytes"]
            build = replace(plain, signature=signature, constants=constants, divisible=even)
            self.told[count] = TritonKernel(build, self.target)
        return True
