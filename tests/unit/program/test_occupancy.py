"""Kernels of steps from a profiler's trace."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from convoy.program.occupancy import capacity, kernels_of_steps
from convoy.schedule import DeviceResources, KernelResources, share_of


def mark(step: int, begin: float, length: float) -> dict[str, object]:
    return {"ph": "X", "cat": "user_annotation", "name": f"convoy.step.{step}", "ts": begin, "dur": length}


def kernel(begin: float, length: float, grid: tuple[int, ...], **said: object) -> dict[str, object]:
    args = {"grid": list(grid), "block": [128, 2, 1], "registers per thread": 64, "shared memory": 4096, **said}
    return {"ph": "X", "cat": "kernel", "name": "k", "ts": begin, "dur": length, "args": args}


def test_kernels_belong_to_the_step_in_whose_marks_they_ran():
    events = [
        mark(0, 100, 50),
        kernel(110, 5, (66, 2, 1)),
        kernel(120, 20, (10, 1, 1)),
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 105, "dur": 2},
        {"ph": "X", "cat": "user_annotation", "name": "other", "ts": 0, "dur": 1000},
        mark(1, 160, 10),
        mark(2, 180, 30),
        kernel(190, 10, (132, 1, 1)),
        kernel(400, 10, (1, 1, 1)),
        {"ph": "M", "name": "process_name"},
    ]
    found = kernels_of_steps(events, 3)
    assert found == [
        [KernelResources(132, 256, 64, 4096, 5.0), KernelResources(10, 256, 64, 4096, 20.0)],
        [],
        [KernelResources(132, 256, 64, 4096, 10.0)],
    ]
    device = DeviceResources(sms=132)
    assert [share_of(kernels, device) for kernels in found] == [
        pytest.approx((132 / 528 * 5 + 10 / 528 * 20) / 25),
        0.0,
        pytest.approx(0.25),
    ]


def test_a_devices_capacity_is_what_its_driver_says(monkeypatch: pytest.MonkeyPatch):
    said = SimpleNamespace(multi_processor_count=108, max_threads_per_multi_processor=1536)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: said)
    assert capacity(torch.device("cuda")) == DeviceResources(sms=108, threads=1536)
