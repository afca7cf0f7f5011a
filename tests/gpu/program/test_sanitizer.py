"""Several streams under PyTorch's CUDA stream sanitizer: silent, and not so where the waits are taken away."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the processes find the first one's measurements."""
    return tmp_path_factory.mktemp("sanitizer")


@pytest.mark.parametrize("part", ["program", "updates"])
def test_the_stream_sanitizer_is_silent_and_sees_a_planted_race(folder: Path, part: str):
    worker = Path(__file__).with_name("sanitizer_worker.py")
    command = [sys.executable, str(worker), str(folder), part]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    # A race ends the process, so there was none before it said so.
    assert done.stdout.strip().endswith("silent"), done.stderr[-3000:]
    assert done.returncode != 0
    assert "data race" in done.stderr
