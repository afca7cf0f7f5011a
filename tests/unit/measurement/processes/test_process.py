"""A worker's end: compilers that it started remove their files, and what does not end is killed."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from convoy.measurement.processes import process
from convoy.measurement.processes.process import WorkerProcess

WORKER = '''
import json, subprocess, sys, time

COMPILER = """
import signal, sys, time
from pathlib import Path

half = Path(sys.argv[1])

def clean(*_):
    time.sleep(0.05)
    half.unlink()
    sys.exit(1)

signal.signal(signal.SIGTERM, clean if sys.argv[2] == "tidy" else signal.SIG_IGN)
half.write_text("half")
time.sleep(60)
"""


def main():
    hello = json.loads(sys.stdin.readline())
    subprocess.Popen([sys.executable, "-c", COMPILER, hello["file"], hello["kind"]])
    print(json.dumps({"ready": True}), flush=True)
    time.sleep(60)
'''


def started(folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> tuple[WorkerProcess, Path]:
    (folder / "with_compiler.py").write_text(WORKER, encoding="utf-8")
    monkeypatch.syspath_prepend(str(folder))
    half = folder / "half"
    worker = WorkerProcess({"file": str(half), "kind": kind}, {}, "with_compiler")
    worker.receive(60)
    end = time.monotonic() + 60
    while not half.exists() or not half.read_text():
        assert time.monotonic() < end
        time.sleep(0.01)
    return worker, half


@pytest.mark.skipif(sys.platform == "win32", reason="process groups are POSIX's")
def test_a_compiler_removes_what_it_has_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(process, "CLEAN_UP_S", 60.0)
    worker, half = started(tmp_path, "tidy", monkeypatch)
    worker.end()
    assert not half.exists()


@pytest.mark.skipif(sys.platform == "win32", reason="process groups are POSIX's")
def test_what_does_not_end_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(process, "CLEAN_UP_S", 0.1)
    worker, half = started(tmp_path, "stubborn", monkeypatch)
    worker.end()
    end = time.monotonic() + 60
    while running(half):
        assert time.monotonic() < end, "it goes on"
        time.sleep(0.01)


def running(half: Path) -> bool:
    """Whether a process has the file among its arguments, and is no zombie."""
    for found in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(half).encode() in found.read_bytes():
                return True
        except OSError:
            continue
    return False
