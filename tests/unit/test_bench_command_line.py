"""A wrong argument of a benchmark ends in one line, not in a traceback."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pytest
from bench.shared.command_line import counts, run_main

from convoy.errors import InputError

ROOT = Path(__file__).resolve().parents[2]


def test_counts_are_read_and_other_words_refused() -> None:
    assert counts("1, 32") == [1, 32]
    for wrong in ("", "1,x", "0", "-1", "1.5"):
        with pytest.raises(argparse.ArgumentTypeError, match="integers of at least 1"):
            counts(wrong)


def test_an_error_of_convoys_is_the_last_line() -> None:
    def main() -> None:
        raise InputError("run", "none.json", "a run file that is there")

    with pytest.raises(SystemExit, match=r"run: got 'none.json', expected a run file that is there"):
        run_main(main)


@pytest.mark.parametrize(
    ("words", "said"),
    [(("--known", "none.json", "--folder", "made"), "none.json"), (("--gpus", "two"), "integers of at least 1")],
)
def test_the_scaling_benchmark_says_in_a_line_what_is_wrong(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    script = [sys.executable, str(ROOT / "bench" / "scaling" / "scaling.py"), "--device", "cpu", "--gpus", "1"]
    done = subprocess.run([*script, *words], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert said in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
