"""Several streams under PyTorch's CUDA stream sanitizer: silent, and not so where the waits are taken away."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu


def run(folder: Path, word: str) -> subprocess.CompletedProcess[str]:
    worker = Path(__file__).with_name("sanitizer_worker.py")
    command = [sys.executable, str(worker), str(folder), word]
    return subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)


def test_the_stream_sanitizer_is_silent_and_sees_a_planted_race(tmp_path: Path):
    whole = run(tmp_path, "whole")
    assert whole.returncode == 0, whole.stderr[-3000:]
    assert whole.stdout.strip().endswith("silent")
    assert "data race" not in whole.stderr
    planted = run(tmp_path, "planted")
    assert planted.returncode != 0
    assert "data race" in planted.stderr
