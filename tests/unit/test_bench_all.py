"""bench/all.py: what is missing, what ends badly, and that every job's command line is one that its script takes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from bench import all as every


def job(name: str, code: str, minutes: float = 0.01) -> every.Job:
    return every.Job(name, minutes, ("-c", code))


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> list[every.Job]:
    found = [job("good", "print('{seconds}')"), job("bad", "raise SystemExit(3)"), job("long", "", 60.0)]
    monkeypatch.setattr(every, "jobs", lambda: found)
    return found


def test_the_next_call_goes_on_and_another_commit_begins_anew(tmp_path: Path, planted: list[every.Job]) -> None:
    state = every.State(tmp_path, "aaaa")
    assert state.missing(1) == planted
    every.carry_out(state, state.missing(1), tmp_path, tmp_path / "db", minutes=1)
    assert [one.name for one in every.State(tmp_path, "aaaa").missing(1)] == ["bad", "long"]
    assert state.jobs["bad"]["reason"] == "exit code 3"
    assert "long" not in state.jobs  # there was no time for it
    assert every.State(tmp_path, "bbbb").missing(1) == planted


def test_jobs_for_more_gpus_are_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wide = every.Job("wide", 1.0, ("x",), gpus=2)
    monkeypatch.setattr(every, "jobs", lambda: [wide])
    assert every.State(tmp_path, "a").missing(1) == []
    assert every.State(tmp_path, "a").missing(2) == [wide]


def test_names_are_unique_and_scripts_know_their_options() -> None:
    found = every.jobs()
    assert len({one.name for one in found}) == len(found)
    scripts: dict[str, set[str]] = {}
    for one in found:
        words = every.filled(one, Path("folder"), Path("db"), 60)
        assert not any("{" in word for word in words)
        scripts.setdefault(words[1], set()).update(word for word in words if word.startswith("--"))
    for script, options in scripts.items():
        text = (every.ROOT / script).read_text(encoding="utf-8")
        assert {option for option in options if f'"{option}"' not in text} == set(), script


def test_it_lists_without_measuring(tmp_path: Path) -> None:
    command = [sys.executable, "bench/all.py", "--list", "--folder", str(tmp_path)]
    done = subprocess.run(command, cwd=every.ROOT, capture_output=True, text=True, check=True)
    assert f"{len(every.jobs())} of {len(every.jobs())} jobs are missing" in done.stdout
    assert not any(tmp_path.iterdir())
