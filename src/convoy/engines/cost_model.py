"""A cost model for engines that use PyTorch's operations: a rate for products, a rate for passes over memory, a price per call.

It orders a search and prunes hopeless candidates. On the CPU that it was fitted to (EPYC 9004, one core, layers of VGG-16,
AlexNet and ResNet-50) it is within a factor of two for products and Winograd, and up to five too low for FFTs of large
images.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from convoy.target import Target

_CPU_FLOPS: Final = {"avx512": 100e9, "avx2": 50e9, "neon": 25e9}
"""fp32 operations a second of one core in a matrix product, by instruction set; 10e9 for any other. An EPYC 9004 core reaches
123e9 in oneDNN's convolution of [1, 512, 14, 14] with 512 filters of 3x3."""

_CPU_BYTES: Final = 15e9
"""Bytes a second that one core's elementwise operations read and write, in cache and out of it, on the same machine."""

_CPU_CALL_US: Final = 3.0
_GPU_CALL_US: Final = 2.0
"""Least cost of one PyTorch operation; on a GPU inside a captured graph, where a kernel takes 1.1 us to start."""

_H100_UNITS: Final = 132
_H100_FLOPS: Final = 40e12
_H100_HALF_FLOPS: Final = 400e12
_H100_BYTES: Final = 2e12


@dataclass(frozen=True, slots=True)
class KernelWork:
    """The work of one launch.

    Attributes:
        flops: operations of its matrix products; a multiply-add counts as two.
        bytes: bytes read and written by all of its operations.
        calls: number of PyTorch operations.
        half: whether the products' operands are fp16 or bf16.
    """

    flops: float
    bytes: float
    calls: int
    half: bool = False


def estimate_us(work: KernelWork, target: Target) -> float:
    """Microseconds that a launch should take on a target."""
    if target.device == "cuda":
        share = max(target.units, 1) / _H100_UNITS
        rate = (_H100_HALF_FLOPS if work.half else _H100_FLOPS) * share
        return (work.flops / rate + work.bytes / (_H100_BYTES * share)) * 1e6 + work.calls * _GPU_CALL_US
    cores = max(target.units, 1)
    rate = _CPU_FLOPS.get(target.arch, 10e9) * cores
    return (work.flops / rate + work.bytes / (_CPU_BYTES * cores)) * 1e6 + work.calls * _CPU_CALL_US
