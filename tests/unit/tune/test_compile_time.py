"""A time limit leaves slow compilers a share of its seconds; what this process has compiled needs none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from convoy.deadline import Deadline
from convoy.perfdb.row import Measurement, Status
from convoy.problem import EngineConfig, Knobs
from convoy.tune import compile_time
from convoy.tune.compile_time import COMPILE_S, COMPILE_SHARE, fits_in_time

CONFIG = EngineConfig("inductor", 1, Knobs())
WANTED = [(f"problem{index}", CONFIG) for index in range(10)]
ROW = Measurement("problem0", CONFIG, "target", "protocol", Status.OK, 3, 1.0, date="2026-01-01T00:00:00Z")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_compiling_takes_a_share_of_the_time_left(device: str) -> None:
    needed_s = len(WANTED) * COMPILE_S[device] / COMPILE_SHARE
    assert not fits_in_time(WANTED, {}, device, Deadline(0.9 * needed_s))
    assert fits_in_time(WANTED, {}, device, Deadline(1.1 * needed_s))
    assert fits_in_time(WANTED, {}, device, Deadline())
    assert fits_in_time([], {}, device, Deadline(0.001))


def test_what_this_process_measured_is_compiled_already(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {key: [replace(ROW, problem=key)] for key, _ in WANTED}
    assert not fits_in_time(WANTED, rows, "cuda", Deadline(1.0))  # measured on another day, by another process
    monkeypatch.setattr(compile_time, "_STARTED", ROW.date)
    assert fits_in_time(WANTED, rows, "cuda", Deadline(1.0))
