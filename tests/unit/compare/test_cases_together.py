"""Cases built side by side: nothing is built while one is timed, and a lack of memory beside others is not the last word."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from convoy.compare.comparison import Comparison
from convoy.compare.ready_frameworks import ReadyFrameworks
from convoy.compare.runs.rows import Row
from convoy.compare.runs.runfile import Run
from convoy.measurement import detect_target
from tests.unit.compare.test_comparison import CASE, LIMITS, importable, material, planted, ready

__all__ = ["importable", "material", "ready"]

CASES = [replace(CASE, batch=batch) for batch in (2, 3, 4)]


def run_of(path: Path, *names: str) -> tuple[list[Row], list[str]]:
    """The rows of the cases, two of them side by side, and what the observer was told."""
    said: list[str] = []
    target = replace(detect_target("cpu"), device="cuda")
    limits = replace(LIMITS, jobs=4, cases=2)
    with Comparison(Run("compare", {}), path, target, limits, lambda what, *_: said.append(what)) as one:
        one.run_cases(CASES, planted(*names))
        return list(one.run.rows), said


@pytest.fixture(autouse=True)
def same_material(ready: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU is asked for its memory."""
    monkeypatch.setattr(ReadyFrameworks, "exceeds_memory_share", lambda *_: False)


def test_a_group_is_built_before_its_first_case_is_timed(tmp_path: Path) -> None:
    rows, said = run_of(tmp_path / "run.json", "right", "later")
    assert {(row.provider, row.batch): row.status for row in rows} == {
        (name, case.batch): status for case in CASES for name, status in (("right", "ok"), ("later", "launch_error"))
    }
    turns = [index for index, what in enumerate(said) if "in turn" in what]
    assert len(turns) == 3
    first, second, third = CASES
    builds = [index for index, what in enumerate(said) if what.endswith((": right", ": later"))]
    of_group = [index for index in builds if not said[index].startswith(third.label())]
    assert len(of_group) == 4
    assert max(of_group) < turns[0]
    assert [said[index] for index in turns] == [f"{case.label()}: in turn" for case in (first, second, third)]


def test_what_lacked_memory_beside_others_is_built_again_alone(tmp_path: Path) -> None:
    rows, said = run_of(tmp_path / "run.json", "exhausted")
    assert [row.status for row in rows] == ["out_of_memory"] * 3
    built = [what for what in said if what.endswith(": exhausted")]
    assert [built.count(f"{case.label()}: exhausted") for case in CASES] == [2, 2, 1]


def test_what_waits_gives_way_where_the_memory_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = iter([True])
    monkeypatch.setattr(ReadyFrameworks, "exceeds_memory_share", lambda *_: next(full, False))
    rows, said = run_of(tmp_path / "run.json", "right")
    assert [(row.status, row.detail.get("provisional", False), row.noisy) for row in rows] == [("ok", False, False)] * 3
    assert sum(what.endswith(": right") for what in said) == 4
