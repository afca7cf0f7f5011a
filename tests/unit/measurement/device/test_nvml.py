"""The answers of a GPU's driver, and Convoy's use of those that are missing. A fake stands for the library."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from convoy.measurement.device import nvml
from convoy.measurement.device.nvml import Gpu, own_bytes

BUS = "00000000:1B:00.0"
UNKNOWN = (1 << 64) - 1


class Nvml:
    """libnvidia-ml as far as it is used; 12345 mJ.

    Args:
        processes: number and bytes of those that run, as the driver knows them.
        count: of GPUs.
        rc: what the call for energy gives.
    """

    def __init__(self, *processes: tuple[int, int], count: int = 1, rc: int = 0) -> None:
        self.processes, self.count, self.rc = processes, count, rc
        self.asked: list[int] = []

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetHandleByPciBusId_v2(self, bus_id: bytes, device: Any) -> int:
        return 0 if bus_id == BUS.encode() else 6

    def nvmlDeviceGetCount_v2(self, number: Any) -> int:
        number._obj.value = self.count
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, device: Any) -> int:
        return 0 if index == 0 else 1

    def nvmlDeviceGetTotalEnergyConsumption(self, device: Any, value: Any) -> int:
        value._obj.value = 12345
        return self.rc

    def nvmlDeviceGetComputeRunningProcesses_v3(self, device: Any, count: Any, found: Any) -> int:
        self.asked.append(count._obj.value)
        room, count._obj.value = count._obj.value, len(self.processes)
        if room < len(self.processes):
            return 7
        for at, (pid, size) in enumerate(self.processes):
            found[at].pid, found[at].used_bytes = pid, size
        return 0


def gpu(library: Any, bus_id: str = BUS) -> Gpu:
    found = Gpu.open(bus_id, lambda _: library)
    assert found is not None
    return found


def test_energy_is_told_in_joules() -> None:
    assert gpu(Nvml()).joules() == pytest.approx(12.345)
    assert gpu(Nvml(rc=3)).joules() is None


def test_a_gpu_or_a_library_that_is_not_there() -> None:
    def absent(_: str) -> Any:
        raise OSError

    assert Gpu.open(BUS, absent) is None
    assert Gpu.open("nowhere", lambda _: Nvml()) is None
    assert Gpu.open("x" * 40, lambda _: Nvml()) is None


@pytest.mark.parametrize(("count", "found"), [(1, True), (2, False)])
def test_without_a_bus_id_the_only_gpu_is_meant(count: int, found: bool) -> None:
    assert (Gpu.open("", lambda _: Nvml(count=count)) is not None) == found


def test_memory_is_that_of_one_process() -> None:
    assert gpu(Nvml((7, 100), (8, 30), (7, 5))).process_bytes(7) == 105, "of all its instances"
    assert gpu(Nvml((7, 100))).process_bytes(9) is None, "a container may number processes otherwise"
    assert gpu(Nvml((7, UNKNOWN), (8, 30))).process_bytes(7) is None
    many = Nvml(*((pid, 10 * pid) for pid in range(200)))
    assert gpu(many).process_bytes(150) == 1500
    assert many.asked == [32, 200]


def test_a_driver_without_the_call_tells_nothing() -> None:
    class Old:
        nvmlInit_v2 = Nvml.nvmlInit_v2
        nvmlDeviceGetHandleByPciBusId_v2 = Nvml.nvmlDeviceGetHandleByPciBusId_v2

    class Refusing(Nvml):
        def nvmlDeviceGetComputeRunningProcesses_v3(self, device: Any, count: Any, found: Any) -> int:
            return 3

    assert gpu(Old()).process_bytes(7) is None
    assert gpu(Refusing((7, 100))).process_bytes(7) is None


def test_own_memory_is_asked_of_the_current_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    told = gpu(Nvml((os.getpid(), 77)))

    def opened(bus_id: str) -> Gpu:
        asked.append(bus_id)
        return told

    properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(Gpu, "open", opened)
    nvml.gpu_of.cache_clear()
    try:
        assert (own_bytes(), own_bytes()) == (77, 77)
        assert [bus.upper() for bus in asked] == [BUS], "it is found once"
        monkeypatch.setattr(Gpu, "open", lambda _: None)
        nvml.gpu_of.cache_clear()
        assert own_bytes() is None
    finally:
        nvml.gpu_of.cache_clear()
