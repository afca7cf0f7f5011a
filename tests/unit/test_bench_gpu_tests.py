"""bench/gpu_tests/gpu_tests.py: its phases, the last line of pytest, one GPU a process."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"


@pytest.mark.parametrize(
    ("last", "passed", "failed", "skipped", "ended"),
    [
        ("=== 3557 passed, 677 skipped, 14 warnings in 306.52s (0:05:06) ===", 3557, 0, 677, True),
        ("=== 2 failed, 5 passed, 1 error in 3.1s ===", 5, 3, 0, True),
        ("!!! KeyboardInterrupt !!!", 0, 0, 0, False),
        ("", 0, 0, 0, False),
    ],
)
def test_the_last_line_is_counted(
    last: str, passed: int, failed: int, skipped: int, ended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = importlib.import_module("bench.gpu_tests.gpu_tests").counted(f"collected 9 items\n{last}\n", 1.0)
    assert (outcome.passed, outcome.failed, outcome.skipped, outcome.ended) == (passed, failed, skipped, ended)


def test_a_run_that_the_time_limit_stops_keeps_its_verdicts() -> None:
    script = importlib.import_module("bench.gpu_tests.gpu_tests")
    lines = [
        "tests/gpu/a.py::test_a[x y]",
        "[gw3] [  1%] PASSED tests/gpu/a.py::test_a[xy]",
        "[gw0] [  2%] FAILED tests/gpu/a.py::test_b",
        "[gw11] [ 10%] SKIPPED tests/gpu/a.py::test_c",
        "[gw1] [ 11%] ERROR tests/gpu/a.py::test_d",
        "[gw1] [ 12%] PAS",
    ]
    outcome = script.counted_so_far("\n".join(lines), 2.0)
    assert (outcome.passed, outcome.failed, outcome.skipped, outcome.ended) == (1, 2, 1, False)
    assert [test for test, word in script.verdicts("\n".join(lines)) if word == "FAILED"] == ["tests/gpu/a.py::test_b"]


def test_every_test_on_a_gpu_is_in_a_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = {path for phase in importlib.import_module("bench.gpu_tests.gpu_tests").PHASES for path in phase.paths}
    root = BENCH.parent / "tests" / "gpu"
    folders = {f"tests/gpu/{file.relative_to(root).parts[0]}" for file in root.rglob("test_*.py")}
    assert folders | {"tests/fuzz"} == paths


def test_processes_are_spread_over_the_gpus_that_this_one_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    found = subprocess.run(
        [sys.executable, "-c", "import tests.conftest, os; print(os.environ['CUDA_VISIBLE_DEVICES'])"],
        env={**os.environ, "CONVOY_TEST_GPUS": "2,5,7", "PYTEST_XDIST_WORKER": "gw4"},
        cwd=BENCH.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout == "5\n"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,3")
    assert importlib.import_module("bench.gpu_tests.gpu_tests").visible_gpus() == ("1", "3")
