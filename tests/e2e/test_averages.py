"""Gradients averaged over eight processes, in several buckets at once: in their own dtype, in bf16, and with error feedback."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e import averages_worker
from tests.e2e.forked import joined, start

pytestmark = pytest.mark.xdist_group("forked")

PROCESSES = 8


def test_averages_of_eight_processes(tmp_path: Path):
    started = [start(averages_worker.main, rank, PROCESSES, tmp_path) for rank in range(PROCESSES)]
    assert [joined(process) for process in started] == [0] * PROCESSES
    assert {path.read_text() for path in tmp_path.glob("?.txt")} == {"right"}
