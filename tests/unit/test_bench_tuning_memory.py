"""bench/tuning/tuning_memory.py sees the device's peak, whoever takes it, and nothing of what was there before; its table."""

from __future__ import annotations

import importlib
import os
import threading

import pytest
import torch

import convoy
from convoy.measurement.device.memory_limit import MIN_ISOLATED_BYTES

TOTAL = 1000


@pytest.fixture
def bench(monkeypatch):
    return importlib.import_module("bench.tuning.tuning_memory")


class Device:
    """One of `TOTAL` bytes; `seen` is set once it was looked at with a peak on it."""

    def __init__(self, taken: int) -> None:
        self.taken, self.peak, self.seen = taken, 0, threading.Event()

    def look(self) -> tuple[int, int]:
        if self.taken == self.peak:
            self.seen.set()
        return TOTAL - self.taken, TOTAL


def test_a_peak_between_two_looks_of_the_caller_counts(bench, monkeypatch):
    device = Device(taken=100)
    monkeypatch.setattr(torch.cuda, "mem_get_info", device.look)
    monkeypatch.setattr(bench, "release", lambda: None)
    with bench.watched() as watch:
        device.peak = 700
        device.taken = 700
        assert device.seen.wait(10)
        device.taken = 300
    assert watch.bytes == 600
    with bench.watched() as watch:
        device.taken = 350
    assert watch.bytes == 50


def test_nobody_looks_once_the_block_is_left(bench, monkeypatch):
    device = Device(taken=100)
    monkeypatch.setattr(torch.cuda, "mem_get_info", device.look)
    monkeypatch.setattr(bench, "release", lambda: None)
    before = threading.active_count()
    with pytest.raises(ValueError, match="planted"), bench.watched() as watch:
        raise ValueError("planted")
    assert threading.active_count() == before
    device.taken = 900
    assert watch.bytes == 0


def doubled(number):
    """In a process of its own."""
    return 2 * number, os.getpid()


def refused():
    raise ValueError("planted")


def test_what_another_process_took_counts_and_its_error_is_told(bench, monkeypatch):
    device = Device(taken=100)
    monkeypatch.setattr(torch.cuda, "mem_get_info", device.look)
    monkeypatch.setattr(bench, "release", lambda: None)

    class Pool(bench.ProcessPoolExecutor):
        def submit(self, *args):
            device.peak = device.taken = 600
            assert device.seen.wait(10)
            device.taken = 100
            return super().submit(*args)

    monkeypatch.setattr(bench, "ProcessPoolExecutor", Pool)
    (found, process), took = bench.alone(doubled, 21)
    assert (found, took) == (42, 500)
    assert process != os.getpid()
    with pytest.raises(ValueError, match="planted"):
        bench.alone(refused)


def test_a_limit_without_room_for_another_context_is_kept_in_one_process(bench):
    least = MIN_ISOLATED_BYTES
    assert bench.limits(float(least)) == {"tuning_memory_bytes": least, "isolate": True}
    assert bench.limits(least - 1.0)["isolate"] is False
    assert convoy.Settings(**bench.limits(-5.0)).tuning_memory_bytes == 1


def test_the_table_shows_what_either_took_and_gave(monkeypatch):
    about = {"subject": "net", "dtype": "fp16", "batch": "32", "device": "H200", "commit": "abc", "versions": "cudnn=9"}
    figures = {
        ("convoy", "tuning_memory_bytes"): "3e9",
        ("convoy", "running_memory_bytes"): "2e9",
        ("convoy", "latency_ms"): "0.5",
        ("convoy.limited", "tuning_limit_bytes"): "2.5e9",
        ("convoy.limited", "tuning_memory_bytes"): "2.7e9",
        ("convoy.limited", "latency_ms"): "0.51",
    }
    rows = [{**about, "provider": name, "metric": metric, "p50": p50} for (name, metric), p50 in figures.items()]
    page = importlib.import_module("bench.tuning.choice_tables").tuning_memory_table(rows, "Memory of tuning")
    assert "| net | fp16 | 32 | 2000 | 3000 | 2500 | 2700 | 0.500 | 0.510 |" in page
