"""Reads from NVIDIA's driver (NVML) the energy that a GPU has used, and the memory that a process takes.

It uses ctypes: these are a few calls of a library that comes with the driver, and NVML's Python package is not always
installed.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import cache
from typing import Any, Final, Self

import torch

from convoy.typed_torch import gpu_properties

_PCI: Final = 32
"""Longest bus id with its end, NVML_DEVICE_PCI_BUS_ID_BUFFER_SIZE."""

_TOO_SMALL: Final = 7
"""NVML_ERROR_INSUFFICIENT_SIZE: there are more processes than were asked for."""

_NOT_TOLD: Final = (1 << 64) - 1
"""NVML_VALUE_NOT_AVAILABLE of a size."""


class _Process(ctypes.Structure):
    """nvmlProcessInfo_t, as the second and the third version of the call fill it in."""

    _fields_ = [
        ("pid", ctypes.c_uint),
        ("used_bytes", ctypes.c_ulonglong),
        ("instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    ]


class Gpu:
    """One GPU in NVML.

    Args:
        library: libnvidia-ml, initialised.
        device: its handle there.
    """

    def __init__(self, library: Any, device: ctypes.c_void_p) -> None:
        self._library, self._device = library, device

    @classmethod
    def open(cls, bus_id: str, load: Callable[[str], Any] = ctypes.CDLL) -> Self | None:
        """Open a GPU; None if there is no such library, or no such GPU.

        Args:
            bus_id: PCI bus id ("00000000:1B:00.0"), which does not depend on CUDA_VISIBLE_DEVICES; empty: the only GPU.
            load: loads a library by name.
        """
        try:
            library = load("nvml.dll" if os.name == "nt" else "libnvidia-ml.so.1")
        except OSError:
            return None
        device = ctypes.c_void_p()
        if len(bus_id) >= _PCI or library.nvmlInit_v2() != 0 or not _find(library, bus_id, device):
            return None
        return cls(library, device)

    def joules(self) -> float | None:
        """Energy used since the driver was loaded (Volta and later); None without such a counter."""
        value = ctypes.c_ulonglong()
        failed = self._library.nvmlDeviceGetTotalEnergyConsumption(self._device, ctypes.byref(value))
        return None if failed else value.value / 1e3

    def process_bytes(self, pid: int) -> int | None:
        """Memory that a process takes, CUDA contexts included; None if the driver does not report it.

        In a container the driver may know the process by another number, and older drivers have no such call.
        """
        ask = getattr(self._library, "nvmlDeviceGetComputeRunningProcesses_v3", None)
        if ask is None:
            return None
        most = 32
        while True:
            found, count = (_Process * most)(), ctypes.c_uint(most)
            failed = ask(self._device, ctypes.byref(count), found)
            if failed != _TOO_SMALL:
                break
            most = max(2 * most, count.value)
        sizes = [] if failed else [one.used_bytes for one in found[: count.value] if one.pid == pid]
        return sum(sizes) if sizes and _NOT_TOLD not in sizes else None


def _find(library: Any, bus_id: str, device: ctypes.c_void_p) -> bool:
    """Fill in the GPU's handle; without a bus id, only if there is no other GPU."""
    if bus_id:
        return library.nvmlDeviceGetHandleByPciBusId_v2(bus_id.encode(), ctypes.byref(device)) == 0
    count = ctypes.c_uint()
    if library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0 or count.value != 1:
        return False
    return library.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device)) == 0


@cache
def gpu_of(index: int) -> Gpu | None:
    """One of torch's GPUs, by its index; None if its driver does not answer."""
    found = gpu_properties(index)
    return Gpu.open(f"{found.pci_domain_id:08x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0")


def own_bytes() -> int | None:
    """Memory that this process takes of torch's current GPU, CUDA context included; None if the driver does not report it."""
    gpu = gpu_of(torch.cuda.current_device())
    return None if gpu is None else gpu.process_bytes(os.getpid())
