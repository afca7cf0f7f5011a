"""bench/tuning_memory.py sees the device's peak, whoever takes it, and nothing of what was there before; its table."""

from __future__ import annotations

import importlib
import threading
from pathlib import Path

import pytest
import torch

TOTAL = 1000


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "bench"))
    return importlib.import_module("tuning_memory")


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


def test_the_table_shows_both_and_how_many_times(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "bench"))
    about = {"subject": "net", "dtype": "fp16", "batch": "32", "device": "H200", "commit": "abc", "versions": "cudnn=9"}
    rows = [
        {**about, "metric": "tuning_memory_bytes", "p50": "3e9"},
        {**about, "metric": "running_memory_bytes", "p50": "2e9"},
    ]
    page = importlib.import_module("choice_tables").tuning_memory_table(rows, "Memory of tuning")
    assert "| net | fp16 | 32 | 3000 | 2000 | 1.50 |" in page
