"""What a launch takes of a GPU while it runs: blocks, threads, registers and shared memory, as a share of what there is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

REGISTER_UNIT = 256
"""Registers are given to a warp in units of this many (CUDA occupancy calculator, compute capability 7.0 on)."""

WARP = 32


@dataclass(frozen=True, slots=True)
class DeviceResources:
    """What a GPU has.

    Attributes:
        sms: streaming multiprocessors.
        threads: of one of them, as the following.
        registers: 32-bit.
        shared_bytes: shared memory.
        blocks: most that are resident.
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
        blocks: of its grid.
        threads: of a block.
        registers: of a thread.
        shared_bytes: of a block, static and dynamic.
        time_us: alone.
    """

    blocks: int
    threads: int
    registers: int = 0
    shared_bytes: int = 0
    time_us: float = 0.0

    def resident(self, device: DeviceResources) -> int:
        """Blocks that one multiprocessor holds at a time; at least 1, for the kernel runs."""
        warps = -(-self.threads // WARP)
        grains = -(-self.registers * WARP // REGISTER_UNIT) * REGISTER_UNIT
        limits = [device.blocks, device.threads // (warps * WARP)]
        if grains:
            limits.append(device.registers // (grains * warps))
        if self.shared_bytes:
            limits.append(device.shared_bytes // self.shared_bytes)
        return max(1, min(limits))

    def share(self, device: DeviceResources) -> float:
        """Part of the device that its blocks fill, at most 1: what is left is room for another kernel's blocks."""
        return min(1.0, self.blocks / (self.resident(device) * device.sms))


def share_of(kernels: Sequence[KernelResources], device: DeviceResources) -> float:
    """The share of a launch of several kernels: their mean, weighed by time; 0 where there are none."""
    total = sum(kernel.time_us for kernel in kernels)
    if not total:
        return max((kernel.share(device) for kernel in kernels), default=0.0)
    return sum(kernel.share(device) * kernel.time_us for kernel in kernels) / total
