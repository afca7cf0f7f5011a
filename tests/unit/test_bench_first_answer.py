"""bench/first_answer.py: what each of its processes finds, and its table."""

from __future__ import annotations

import csv
import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bench.tuning.versions import CACHES

FOUND = {"stored": True, "device": "a CPU", "versions": "torch=2.13.0"}
"""The fields that a process prints besides its figures."""


@pytest.fixture
def script() -> Any:
    return importlib.import_module("bench.first_answer")


def test_only_the_first_process_finds_nothing(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each child leaves a file in its caches and its database, as compilers and Convoy would."""
    seen: list[tuple[bool, bool]] = []

    def child(command: list[str], *, env: dict[str, str], **_: Any) -> SimpleNamespace:
        assert json.loads(command[-1]) == ["net", 2, "fp16", "cpu", 0.0, False]
        caches, database = [Path(env[name]) for name in CACHES], Path(env["CONVOY_DB"])
        assert len({path.parent for path in (*caches, database)}) == 1
        seen.append((any(path.exists() for path in caches), database.exists()))
        for path in caches:
            path.mkdir(exist_ok=True)
        database.touch()
        return SimpleNamespace(
            returncode=0, stdout=f"noise\n{json.dumps({'first_s': len(seen), 'cpu_s': 2 * len(seen)})}\n"
        )

    monkeypatch.setattr(script.subprocess, "run", child)
    rounds = [script.three_starts("net", 2, "fp16", "cpu") for _ in range(3)]
    assert seen == [(False, False), (True, False), (True, True)] * 3
    figures = script.figures_of(rounds)
    assert {name: one["p50"] for name, one in figures.items()} == {
        "first_s": 4, "again_s": 5, "stored_s": 6, "first_cpu_s": 8, "again_cpu_s": 10, "stored_cpu_s": 12,
    }  # fmt: skip
    assert figures["first_s"] == {"p50": 4, "p20": 1, "p80": 7}


def test_a_child_that_fails_is_told_in_a_line(script: Any) -> None:
    with pytest.raises(SystemExit, match=r"^no_such_net: .*InputError: model: got 'no_such_net'"):
        script.three_starts("no_such_net", 1, "fp32", "cpu")


def test_the_table_has_a_column_for_each_start(script: Any) -> None:
    common = {"batch": "1", "device": "a CPU", "commit": "0123abc", "protocol": "a fresh process each"}
    rows = [
        {**common, "subject": net, "dtype": dtype, "metric": metric, "p50": value}
        for net, dtype, values in (("resnet18", "fp32", "543"), ("resnet50", "fp16", "987"))
        for metric, value in zip(("first_s", "again_s", "stored_s"), values, strict=True)
    ]
    rows.append({**common, "subject": "resnet18", "dtype": "fp32", "metric": "overrun_10s", "p50": "1.01"})
    lines = script.first_answer_table(rows, "First answers").splitlines()
    assert lines[0] == "First answers, a CPU, commit 0123abc, a fresh process each"
    heads = (
        "| net | batch | first answer, s | compiled before, s | from the stored plan, s | time over a limit of 10s |"
    )
    assert lines[2:] == [
        heads, "|---|---|---|---|---|---|",
        "| resnet18 | 1 | 5.00 | 4.00 | 3.00 | 1.01 |", "| resnet50 fp16 | 1 | 9.00 | 8.00 | 7.00 |  |",
    ]  # fmt: skip
    rows.append({**rows[0], "subject": "alexnet", "commit": "4567def"})
    _, second = script.first_answer_table(rows, "First answers").split("\n\nFirst answers")
    assert second.startswith(", a CPU, commit 4567def,")  # a table names one commit
    assert second.endswith("| alexnet | 1 | 5.00 |")


def test_a_run_that_is_cut_short_keeps_the_nets_before(
    script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def starts(net: str, *_: Any) -> dict[str, dict[str, Any]]:
        if net == "third":
            raise KeyboardInterrupt
        return {start: {**FOUND, "first_s": len(net), "cpu_s": 1.0} for start in script.STARTS}

    monkeypatch.setattr(script, "three_starts", starts)
    monkeypatch.setattr(script, "compile_package", lambda folder: None)
    monkeypatch.setattr(script, "compile_installed_packages", lambda: None)
    monkeypatch.setattr(
        script.sys, "argv", ["", "--nets", "one,second,third", "--rounds", "1", "--folder", str(tmp_path)]
    )
    with pytest.raises(KeyboardInterrupt):
        script.main()
    (file,) = tmp_path.iterdir()
    rows = list(csv.DictReader(file.read_text().splitlines()))
    firsts = [(row["subject"], row["p50"]) for row in rows if row["metric"] == "first_s"]
    assert firsts == [("one", "3"), ("second", "6")]
    assert len(rows) == 2 * 2 * len(script.STARTS)
