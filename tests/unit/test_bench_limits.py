"""When bench/limits.py ends a tuning."""

import importlib
from pathlib import Path

import pytest


@pytest.fixture
def limits(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "bench"))
    return importlib.import_module("limits")


def test_tuning_ends_so_long_after_measuring_began(limits, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(limits.time, "monotonic", lambda: now[0])
    watch = limits.stopping(10.0, lambda: 1000.0, 5.0)
    now[0] += 60.0
    watch("counting zeros", 0, 0)  # measures nothing
    watch("conv", 0, 4)
    now[0] += 10.0
    watch("conv", 1, 4)
    now[0] += 0.5
    watch("conv", 4, 4)  # is done
    with pytest.raises(limits.OutOfTimeError, match="conv: 2 of 4"):
        watch("conv", 2, 4)


def test_tuning_ends_where_the_whole_run_has_no_time_left(limits):
    left = [5.0]
    watch = limits.stopping(float("inf"), lambda: left[0], 5.0)
    watch("conv", 0, 4)
    left[0] = 4.9
    with pytest.raises(limits.OutOfTimeError):
        watch("conv", 1, 4)
