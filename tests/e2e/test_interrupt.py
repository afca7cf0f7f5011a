"""Ctrl-C while tuning: exit code 130, one line, and what was measured is kept and used."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import planted
from command import NET, summary

from convoy.perfdb import Database

WORDS = ("optimize", "net.py:small", "--trust", "--size", "16", "--engine", "onednn")


def convoy(folder: Path, *words: str, **environment: str) -> subprocess.Popen[str]:
    """The command, in a session of its own as a shell starts it in a process group of its own."""
    paths = os.pathsep.join([str(Path(planted.__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    given = {**os.environ, "CONVOY_DB": str(folder / "perf.db"), "PYTHONPATH": paths, **environment}
    command = [sys.executable, "-m", "convoy", *words]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, env=given, stdout=pipe, stderr=pipe, text=True, start_new_session=True)


def wait_for(what: Callable[[], bool], process: subprocess.Popen[str], seconds: float = 150.0) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, "it did not come so far in time"
        time.sleep(0.05)


def test_ctrl_c_keeps_what_was_measured(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(NET, encoding="utf-8")
    (tmp_path / "p.json").write_text("mine", encoding="utf-8")
    mark = tmp_path / "stalled"
    words = (*WORDS, "--engine", "planted.stalls", "--plan", "p.json")
    process = convoy(tmp_path, *words, CONVOY_ENGINES=planted.STALLS, PLANTED_MARK=str(mark))
    try:
        wait_for(mark.exists, process)  # the 3x3 convolution is measured, the 1x1 one is being measured
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert out == ""
    assert err == "convoy: interrupted; what was measured is kept in the database\n"
    assert (tmp_path / "p.json").read_text(encoding="utf-8") == "mine"
    with Database.open(tmp_path / "perf.db", shipped=False) as database:
        kept = database.rows()
        assert database.warnings == []
    assert {row.config.engine for row in kept if "r3s3" in row.problem and row.ok} >= {"aten", "onednn"}
    assert not [row for row in kept if row.config.engine == "planted.stalls"]

    again = convoy(tmp_path, *WORDS, "--json", "s.json")
    out, err = again.communicate(timeout=250)
    assert again.returncode == 0, err
    tuning = summary(tmp_path / "s.json")["tuning"]
    assert tuning["from_database"] >= len([row for row in kept if row.config.engine in ("aten", "onednn")]) > 0
    assert tuning["measured"] > 0
    with Database.open(tmp_path / "perf.db", shipped=False) as database:
        assert set(kept) <= set(database.rows())
