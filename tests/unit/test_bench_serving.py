"""bench/serving.py: a package is exported and measured by `convoy`'s own commands, and its rows make a table."""

from __future__ import annotations

import csv
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from convoy.measurement.scenarios.clock import VirtualClock
from convoy.measurement.scenarios.load_test import run_load_test


@pytest.fixture
def script() -> Any:
    return importlib.import_module("bench.serving")


def told(seed: int, bound_ms: float | None = None) -> str:
    """The JSON of `convoy bench` for a net whose batches take 2 ms and 4 ms, on a clock of its own."""
    import dataclasses

    clock = VirtualClock()
    times = {1: 0.002, 8: 0.004}
    found = run_load_test(
        lambda _, size: clock.advance(times[size]), list(times), clock, seconds=20.0, bound_ms=bound_ms, seed=seed
    )
    return json.dumps(dataclasses.asdict(found))


def test_each_seed_is_a_run_and_the_median_a_row(script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[tuple[object, ...]] = []

    def convoy(*words: object) -> str:
        asked.append(words)
        return told(int(str(words[-1]))) if words[0] == "bench" else ""

    monkeypatch.setattr(script, "convoy", convoy)
    monkeypatch.setattr(
        sys, "argv", ["serving.py", "--nets", "net", "--batches", "1,8", "--seeds", "3", "--folder", str(tmp_path)]
    )
    script.main()
    export, *benches = asked
    assert [*export[:2], *export[4:8]] == ["export", "net", "--batches", "1,8", "--time", 180.0]
    assert [one[-2:] for one in benches] == [("--seed", 0), ("--seed", 1), ("--seed", 2)]
    (file,) = tmp_path.glob("serving-*.csv")
    with file.open(newline="", encoding="utf-8") as lines:
        rows = {row["metric"]: row for row in csv.DictReader(lines)}
    assert {name: row["unit"] for name, row in rows.items()} == script.UNITS
    assert float(rows["single_stream_p90_ms"]["p50"]) == pytest.approx(2.0)
    assert float(rows["offline_per_s"]["p50"]) == pytest.approx(2000.0)
    ratio = rows["p99_over_batch"]
    assert float(ratio["p50"]) == pytest.approx(float(rows["server_p99_ms"]["p50"]) / 4.0, rel=1e-4)
    assert float(ratio["p20"]) <= float(ratio["p50"]) <= float(ratio["p80"])
    assert {row["batch"] for row in rows.values()} == {"8"}
    table = script.serving_table(list(rows.values()), "Serving").splitlines()
    assert len(table) == 5
    assert table[-1].startswith("| net | fp32 | 8 | 2.00 | 2000 |")


def test_no_allowed_load_is_zero(script: Any) -> None:
    assert script.figures_of(json.loads(told(0, bound_ms=1.0)))["allowed_per_s"] == 0.0


def test_a_command_that_fails_ends_the_script_with_its_words(script: Any) -> None:
    with pytest.raises(SystemExit, match=r"convoy bench none\.convoy: .*No such file"):
        script.convoy("bench", "none.convoy")
