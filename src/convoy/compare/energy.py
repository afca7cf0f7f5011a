"""Energy of a GPU, by the counter that NVIDIA's driver keeps (NVML, nvmlDeviceGetTotalEnergyConsumption; Volta and later).

Through ctypes, for these are four calls of a library that comes with the driver, and its Python package is not always there.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any

_PCI = 32
"""Longest bus id with its end, NVML_DEVICE_PCI_BUS_ID_BUFFER_SIZE."""


def joules_counter(bus_id: str, load: Callable[[str], Any] = ctypes.CDLL) -> Callable[[], float] | None:
    """A function that reads the joules which a GPU has used since the driver was loaded; None where there is no such counter.

    Args:
        bus_id: PCI bus id of the GPU ("00000000:1B:00.0"), which does not depend on CUDA_VISIBLE_DEVICES; empty: the only GPU.
        load: loads a library by name.
    """
    try:
        library = load("nvml.dll" if os.name == "nt" else "libnvidia-ml.so.1")
    except OSError:
        return None
    device = ctypes.c_void_p()
    if len(bus_id) >= _PCI or library.nvmlInit_v2() != 0:
        return None
    if not _find(library, bus_id, device):
        return None
    value = ctypes.c_ulonglong()

    def joules() -> float:
        library.nvmlDeviceGetTotalEnergyConsumption(device, ctypes.byref(value))
        return value.value / 1e3

    return joules if library.nvmlDeviceGetTotalEnergyConsumption(device, ctypes.byref(value)) == 0 else None


def _find(library: Any, bus_id: str, device: ctypes.c_void_p) -> bool:
    """Fill in the GPU's handle; without a bus id only where there is no other GPU that could be meant."""
    if bus_id:
        return library.nvmlDeviceGetHandleByPciBusId_v2(bus_id.encode(), ctypes.byref(device)) == 0
    count = ctypes.c_uint()
    if library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0 or count.value != 1:
        return False
    return library.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device)) == 0
