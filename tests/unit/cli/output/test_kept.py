"""Ctrl-C amid each long command: exit code 130, and one line that says what is kept."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from convoy.cli import interrupt
from convoy.compare import write
from convoy.compare.runs.rows import Row
from tests.e2e import command as commands

pytestmark = pytest.mark.xdist_group("kept")

SMALL = ("net.py:small", "--trust", "--size", "16")


class _EndedError(BaseException):
    """Raised where the handler would end the process."""


def _end(code: int) -> NoReturn:
    raise _EndedError(code)


def _press(*_: Any, **__: Any) -> NoReturn:
    """Ctrl-C."""
    os.kill(os.getpid(), signal.SIGINT)
    raise AssertionError("the signal was not handled")


def _press_after_a_row(row: Row) -> Callable[..., NoReturn]:
    """Ctrl-C after a first row is in the run file."""

    def press(_cases: Any, _entries: Any, path: Path, *, request: dict[str, Any], **_: Any) -> NoReturn:
        from convoy.compare import Run

        write(Run("compare", {"request": request}, (row,)), path)
        _press()

    return press


@pytest.fixture
def interrupted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., str]:
    """Runs a command that Ctrl-C ends, and gives the line that it writes."""
    (tmp_path / "net.py").write_text(commands.NET, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CONVOY_DB", str(tmp_path / "perf.db"))
    monkeypatch.setattr(interrupt.os, "_exit", _end)
    told: list[str] = []
    write_bytes = os.write

    def note(file: int, data: bytes) -> int:
        if not data.startswith(b"convoy: interrupted; "):
            return write_bytes(file, data)
        told.append(data.decode())
        return len(data)

    monkeypatch.setattr(interrupt.os, "write", note)

    def run(*words: str) -> str:
        told.clear()
        try:
            done = commands.Command(capsys, monkeypatch)(*words)
            code, err = done.code, done.err
        except _EndedError as ended:
            code, err = ended.args[0], capsys.readouterr().err
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        assert code == 130
        assert "Traceback" not in err
        (line,) = told
        return line.removeprefix("convoy: interrupted; ").removesuffix("\n")

    return run


@pytest.mark.parametrize(
    ("words", "moment", "kept"),
    [
        (("optimize", *SMALL), "convoy.pipeline.optimize_model", interrupt.MEASURED),
        (("prune", *SMALL, "--advise"), "convoy.prune.advise", interrupt.MEASURED),
        (("prune", *SMALL, "--sparsity", "0.5"), "convoy.prune.prune_model", interrupt.NOTHING),
        (("layers", *SMALL), "convoy.capture.capture_inference", interrupt.NOTHING),
        (("sparsity", *SMALL), "convoy.capture.capture_inference", interrupt.NOTHING),
        (("doctor",), "convoy.measurement.device.doctor.findings", interrupt.NOTHING),
        (("db", "merge", "net.py"), "convoy.perfdb.Database.merge", "the database has all of the change, or none of it"),
        (("db", "import", "net.py"), "convoy.perfdb.Database.import_", "the database has all of the change, or none of it"),
        (("db", "clear", "--yes"), "convoy.perfdb.Database.clear", "the database has all of the change, or none of it"),
        (("scale", *SMALL, "--gpus", "1"), "convoy.compare.scaling.scaling_launch.run", "nothing was measured yet"),
        (("study", "--sweep", "batch"), "convoy.cli.command_parts.study_session.StudySession.layers", "nothing was measured yet"),
        (
            ("train", *SMALL, "--data", "synthetic:8", "--batch", "4"),
            "convoy.training.trainer.fit.fit",
            f"nothing of this training is kept (see --checkpoint); {interrupt.MEASURED}",
        ),
        (
            ("train", *SMALL, "--data", "synthetic:8", "--batch", "4", "--checkpoint", "state"),
            "convoy.training.trainer.fit.fit",
            "this training has not written state yet",
        ),
    ],
)  # fmt: skip
def test_ctrl_c_says_what_is_kept(
    interrupted: Callable[..., str], monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], moment: str, kept: str
) -> None:
    monkeypatch.setattr(moment, _press)
    assert interrupted(*words) == kept


def test_a_run_file_says_how_many_rows_it_holds(
    interrupted: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("compare", *SMALL, "--frameworks", "torch", "--out", "c.json")
    monkeypatch.setattr("convoy.compare.comparison.compare", _press_after_a_row(Row("net", "torch", "absent", "why")))
    assert interrupted(*words) == "c.json holds 1 row; the same command goes on from there"
    monkeypatch.setattr("convoy.compare.comparison.compare", _press)
    assert interrupted(*words) == "c.json is as it was"


def test_a_run_file_that_cannot_be_read_is_no_traceback(
    interrupted: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoilt(_cases: Any, _entries: Any, path: Path, **_: Any) -> NoReturn:
        path.write_text("{", encoding="utf-8")
        _press()

    monkeypatch.setattr("convoy.compare.comparison.compare", spoilt)
    assert interrupted("compare", *SMALL, "--frameworks", "torch").startswith("what was kept cannot be read: ")
