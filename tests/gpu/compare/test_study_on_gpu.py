"""On a GPU: a study takes energy, and a second one comes from the database."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from convoy.cli.app import app
from convoy.compare import read

pytestmark = pytest.mark.gpu

MOST_WATTS = 1500.0
"""Twice the power limit of an H200."""


def test_a_study_has_times_energy_and_a_second_run_measures_nothing(tmp_path: Path) -> None:
    out = tmp_path / "run.json"
    words = ["study", "--sweep", "stride", "--base", "c=32,k=32", "--dtype", "fp16", "--energy", "-o", str(out)]
    words += ["--db", str(tmp_path / "perf.db")]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    rows = [row for row in read(out).rows if row.ok]
    assert {"library", "implicit gemm"} <= {row.provider for row in rows}
    for row in rows:
        energy = row.figure("energy_uj")
        # Joules over seconds: no launch takes more power than the device has, with room for a short sample.
        assert energy is None or 10 < energy.p50 / row.figure("time_us").p50 < MOST_WATTS
    assert any(row.figure("energy_uj") for row in rows)
    again = CliRunner().invoke(app, words)
    assert "\n0 candidates measured" in again.output
