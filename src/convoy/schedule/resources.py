"""The GPU resources that a launch takes: blocks, threads, registers and shared memory, as a share of the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

REGISTER_UNIT = 256
"""Registers are allocated to a warp in units of this many (CUDA occupancy calculator, compute capability 7.0 and later)."""

WARP = 32


@dataclass(frozen=True, slots=True)
class DeviceResources:
    """A GPU's resources.

    Attributes:
        sms: streaming multiprocessors.
        threads: per multiprocessor, as all following fields.
        registers: 32-bit registers.
        shared_bytes: shared memory.
        blocks: most resident blocks.
    """

    sms: int
    threads: int = 2048
    registers: int = 65536
    shared_bytes: int = 228 << 10
    blocks: int = 32


@dataclass(frozen=True, slots=True)
class KernelResources:
    """One kernel of a launch.

    Attributes:
        blocks: blocks of its grid.
        threads: threads of a block.
        registers: registers of a thread.
        shared_bytes: shared memory of a block, static and dynamic.
        time_us: its time alone.
    """

    blocks: int
    threads: int
    registers: int = 0
    shared_bytes: int = 0
    time_us: float = 0.0

    def resident(self, device: DeviceResources) -> int:
        """Blocks that one multiprocessor holds at a time; at least 1, because the kernel runs."""
        warps = -(-self.threads // WARP)
        grains = -(-self.registers * WARP // REGISTER_UNIT) * REGISTER_UNIT
        limits = [device.blocks, device.threads // (warps * WARP)]
        if grains:
            limits.append(device.registers // (grains * warps))
        if self.shared_bytes:
            limits.append(device.shared_bytes // self.shared_bytes)
        return max(1, min(limits))

    def share(self, device: DeviceResources) -> float:
        """Share of the device that its blocks fill, at most 1; the rest is free for other kernels."""
        return min(1.0, self.blocks / (self.resident(device) * device.sms))


def share_of(kernels: Sequence[KernelResources], device: DeviceResources) -> float:
    """The share of a launch of several kernels: their mean, weighted by time; 0 without kernels."""
    total = sum(kernel.time_us for kernel in kernels)
    if not total:
        return max((kernel.share(device) for kernel in kernels), default=0.0)
    return sum(kernel.share(device) * kernel.time_us for kernel in kernels) / total
