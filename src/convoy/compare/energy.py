"""Energy of a GPU, by the counter that NVIDIA's driver keeps (`convoy.measurement.device.nvml`)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from convoy.measurement.device.nvml import Gpu


def joules_counter(bus_id: str, load: Callable[[str], Any] = ctypes.CDLL) -> Callable[[], float] | None:
    """A function that reads the joules which a GPU has used since the driver was loaded; None where there is no such counter.

    Args:
        bus_id: PCI bus id of the GPU, or empty: the only GPU (`Gpu.open`).
        load: loads a library by name.
    """
    return counter_of(Gpu.open(bus_id, load))


def counter_of(gpu: Gpu | None) -> Callable[[], float] | None:
    """As `joules_counter`, for an open GPU. If the driver fails to answer later, the counter keeps its last value."""
    first = None if gpu is None else gpu.joules()
    if gpu is None or first is None:
        return None
    last = first

    def joules() -> float:
        nonlocal last
        now = gpu.joules()
        last = last if now is None else now
        return last

    return joules
