"""A database that cannot be written while a model is tuned: the model works all the same, one warning, no row lost."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from convoy.perfdb import Database, Measurement, sql
from convoy.pipeline.check import end_to_end
from tests.e2e.command import Command, summary

WORDS = ("--size", "16", "--only-engines", "onednn")
OUTPUTS = ("--plan", "fault.plan.json", "--report", "fault.html", "--json", "fault.json")


@pytest.fixture
def db(convoy_command: Command, tmp_path: Path) -> Path:
    """A database with the rows of another net in it."""
    path = tmp_path / "own.db"
    convoy_command.works("optimize", "net.py:other", "--trust", *WORDS, "--db", path)
    return path


def rows(path: Path) -> list[Measurement]:
    with Database.open(path, shipped=False) as database:
        assert database.warnings == []
        return database.rows()


def full(connection: sqlite3.Connection) -> None:
    """Not one page more: SQLite itself says that the disk is full."""
    pages = connection.execute("PRAGMA page_count").fetchone()[0]
    connection.execute(f"PRAGMA max_page_count = {max(pages, 1)}")


def read_only(connection: sqlite3.Connection) -> None:
    connection.execute("PRAGMA query_only = ON")


def spoil_connections(monkeypatch: pytest.MonkeyPatch, path: Path, spoil: Callable[[sqlite3.Connection], None]) -> None:
    """Each connection to this file from now on has the fault."""
    connect = sql.connect

    def faulty(to: Path | str, *rest: float) -> sqlite3.Connection:
        connection = connect(to, *rest)
        if Path(to) == path:
            spoil(connection)
        return connection

    monkeypatch.setattr(sql, "connect", faulty)


@pytest.mark.parametrize(("spoil", "says"), [(full, "full"), (read_only, "readonly")])
def test_the_user_gets_a_working_model_and_nothing_is_lost(
    convoy_command: Command,
    db: Path,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    spoil: Callable[[sqlite3.Connection], None],
    says: str,
) -> None:
    before = rows(db)
    assert before
    monkeypatch.setattr(end_to_end, "is_faster", lambda *_: True)  # the plan is to be run, whatever the clock says
    with monkeypatch.context() as patch:
        spoil_connections(patch, db, spoil)
        out = convoy_command.works("optimize", "net.py:small", "--trust", *WORDS, "--db", db, *OUTPUTS)
    (note,) = [line for line in out.splitlines() if "cannot be used for writing" in line]
    assert note.startswith("note: ")
    assert "kept in memory" in out
    found = summary(folder / "fault.json")
    assert found["tuning"]["measured"] > 5
    assert found["rel_l2_error"] < 1e-5
    assert says in " ".join(found["notes"])
    assert (folder / "fault.html").stat().st_size > 1000
    assert "largest output" in convoy_command.works(
        "run", "net.py:small", "--trust", "--plan", "fault.plan.json", "--size", "16"
    )
    assert set(before) <= set(rows(db))
    assert not list(db.parent.glob("*.bad-*"))


def test_a_database_where_no_file_can_be_made(convoy_command: Command, folder: Path) -> None:
    path = Path("/proc/convoy/perf.db")  # nobody may make a file there, root neither
    out = convoy_command.works("optimize", "net.py:other", "--trust", *WORDS, "--db", path, *OUTPUTS)
    assert "note: " in out
    assert "cannot be used for writing" in out
    assert summary(folder / "fault.json")["tuning"]["measured"] > 0
    assert not path.exists()


def test_a_damaged_database_is_moved_aside_with_one_warning(convoy_command: Command, db: Path, folder: Path) -> None:
    db.write_bytes(b"noise" * 5000)
    out = convoy_command.works("optimize", "net.py:other", "--trust", *WORDS, "--db", db, *OUTPUTS)
    assert len([line for line in out.splitlines() if "was damaged" in line]) == 1
    assert summary(folder / "fault.json")["tuning"]["measured"] > 0
    (bad,) = db.parent.glob("own.db.bad-*")
    assert bad.read_bytes() == b"noise" * 5000
    assert rows(db)
