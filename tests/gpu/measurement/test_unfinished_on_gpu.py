"""Recordings that run out of memory fail with their own words, and the process goes on as if they had not been."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

WORKER = Path(__file__).with_name("unfinished_worker.py")


def run(*words: str) -> None:
    done = subprocess.run(
        [sys.executable, str(WORKER), *words],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-20000:]


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("way", ["by_hand", "as_programs_do"])
def test_a_recording_that_runs_out_of_memory_leaves_nothing_behind(way: str, waits: bool) -> None:
    """One that does not wait for the device can mostly be ended; what it leaves is the same."""
    run(way, "waits" if waits else "fails")


def test_a_pool_that_graphs_share_outlives_a_recording_that_runs_out_of_memory() -> None:
    run("shared")
