"""convoy bench of a package: all scenarios, as a table and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.command import Command


def test_a_package_is_measured_in_all_scenarios(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, portable: Path
) -> None:
    command = Command(capsys, monkeypatch)
    found = json.loads(command.works("bench", portable, "--trust", "--seconds", "0.3", "--seed", "4", "--json"))
    assert [one["batch"] for one in found["batches"]] == [2]
    assert found["seed"] == 4
    assert found["offline_samples_per_s"] == found["batches"][0]["samples_per_s"]
    stream = found["single_stream"]
    assert 0 < stream["p50_ms"] <= stream["p90_ms"] <= stream["p99_ms"]
    assert found["server"]["rate"] == pytest.approx(0.7 * found["offline_samples_per_s"])
    text = command.works("bench", portable, "--trust", "--seconds", "0.2", "--p99", "10000")
    assert "server, p99 at most 1e+04 ms" in text
    few = command.works("bench", portable, "--trust", "--seconds", "0.002", "--p99", "10000")
    assert "queries are few" in few
    assert "no load keeps" in command.works("bench", portable, "--trust", "--seconds", "0.1", "--p99", "1e-6")
    assert "--plan: got" in command.refused("bench", portable, "--plan", "p.json")
    assert "--p99: got nan" in command.refused("bench", portable, "--p99", "nan")
