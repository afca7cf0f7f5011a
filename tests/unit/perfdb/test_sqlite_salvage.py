"""Reading SQLite's pages by hand gives what SQLite gives, and survives any bytes."""

from __future__ import annotations

import random
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from convoy.perfdb.sqlite_salvage import Header, read_header, read_records
from tests.unit.perfdb.perfdb_rows import raw

VALUES = [None, 0, 1, -1, 127, -128, 32767, 2**23 - 1, -(2**31), 2**47 - 1, -(2**63), 2**63 - 1, 0.5, -1e300, "", "ä" * 70,
          b"", b"\0\xff", "long " * 40, "overflows " * 900, b"\1" * 30_000]  # fmt: skip


def _key(values: tuple[object, ...]) -> str:
    return repr(values)


@pytest.mark.parametrize("page_bytes", [512, 4096, 65536])
def test_every_kind_of_value_is_read_as_sqlite_reads_it(tmp_path: Path, page_bytes: int) -> None:
    path = tmp_path / "a.db"
    rng = random.Random(3)
    with raw(path) as connection:
        connection.execute(f"PRAGMA page_size = {page_bytes}")
        connection.execute("CREATE TABLE t (a, b, c)")
        connection.execute("BEGIN")
        for rowid in (1, 2, 200, 20_000, 2**40, 2**62):
            connection.execute("INSERT INTO t (rowid, a, b, c) VALUES (?, ?, ?, ?)", (rowid, rowid, None, "x"))
        for _ in range(200):
            connection.execute("INSERT INTO t VALUES (?, ?, ?)", rng.choices(VALUES, k=3))
        connection.execute("COMMIT")
        expected = connection.execute("SELECT a, b, c FROM t").fetchall()
        header = read_header(path)
        assert isinstance(header, Header)
        assert header.page_bytes == page_bytes
    found = [values for values in read_records(path) if len(values) == 3]
    assert sorted(map(_key, found)) == sorted(map(_key, expected))


def test_deleted_and_replaced_rows_do_not_come_back(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    with raw(path) as connection:
        connection.execute("PRAGMA secure_delete = ON")
        connection.execute("CREATE TABLE t (a, b)")
        connection.executemany("INSERT INTO t VALUES (?, ?)", [(i, "x" * (i % 600)) for i in range(500)])
        connection.execute("DELETE FROM t WHERE a % 3")
        connection.execute("UPDATE t SET b = 'new'")
    assert sorted(v for v in read_records(path) if len(v) == 2) == [(i, "new") for i in range(0, 500, 3)]


def test_committed_pages_of_the_log_are_read_and_others_are_not(tmp_path: Path) -> None:
    path, copy = tmp_path / "a.db", tmp_path / "b.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA wal_autocheckpoint = 0")
        connection.execute("PRAGMA cache_size = 5")
        connection.execute("CREATE TABLE t (a, b)")
        for i in range(60):
            connection.execute("INSERT INTO t VALUES (?, ?)", (i, "x" * 300))
        connection.execute("UPDATE t SET b = 'new' WHERE a < 30")
        connection.execute("BEGIN")
        # More than the cache holds, so that uncommitted pages are in the log.
        connection.execute("UPDATE t SET b = ?", ("uncommitted" * 30,))
        for suffix in ("", "-wal"):
            shutil.copyfile(f"{path}{suffix}", f"{copy}{suffix}")
        connection.execute("ROLLBACK")
        expected = connection.execute("SELECT a, b FROM t").fetchall()
    assert b"uncommitted" in (tmp_path / "b.db-wal").read_bytes()
    assert sorted(v for v in read_records(copy) if len(v) == 2) == sorted(expected)


def test_frames_of_an_earlier_log_are_not_read(tmp_path: Path) -> None:
    path, copy = tmp_path / "a.db", tmp_path / "b.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = OFF")
        connection.execute("CREATE TABLE t (a, b)")
        connection.executemany("INSERT INTO t VALUES (?, ?)", [(i, "first" * 50) for i in range(100)])
        connection.execute("UPDATE t SET b = 'second'")
        connection.execute("PRAGMA wal_checkpoint(RESTART)")
        connection.execute("INSERT INTO t VALUES (100, 'second')")
        for suffix in ("", "-wal"):
            shutil.copyfile(f"{path}{suffix}", f"{copy}{suffix}")
    assert b"first" in (tmp_path / "b.db-wal").read_bytes()
    assert sorted(v for v in read_records(copy) if len(v) == 2) == [(i, "second") for i in range(101)]


def test_no_bytes_at_all_make_it_fail(tmp_path: Path) -> None:
    """Seeded: noise, noise behind a true header, and a true file with noise on a page."""
    true, path = tmp_path / "true.db", tmp_path / "a.db"
    with raw(true) as connection:
        connection.execute("CREATE TABLE t (a, b)")
        connection.executemany("INSERT INTO t VALUES (?, ?)", [(i, "x" * (i * 7 % 9000)) for i in range(60)])
    whole = true.read_bytes()
    rng = random.Random(11)
    for trial in range(150):
        noise = rng.randbytes(rng.randrange(20_000))
        data = bytearray((noise, whole[:100] + noise, whole)[trial % 3])
        if trial % 3 == 2:
            for _ in range(200):
                data[rng.randrange(len(data))] = rng.randrange(256)
        path.write_bytes(data)
        (tmp_path / "a.db-wal").write_bytes(noise)
        assert all(isinstance(values, tuple) for values in read_records(path))
        assert isinstance(read_header(path), Header | str)


def test_damage_of_a_page_costs_only_what_lies_on_it(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    with raw(path) as connection:
        connection.execute("CREATE TABLE t (a, b)")
        connection.executemany("INSERT INTO t VALUES (?, ?)", [(i, "x" * 100) for i in range(1000)])
        pages = connection.execute("PRAGMA page_count").fetchone()[0]
    data = bytearray(path.read_bytes())
    at = (pages // 2) * 4096
    data[at : at + 4096] = bytes(4096)
    data[:100] = bytes(100)
    path.write_bytes(data)
    found = {v for v in read_records(path) if len(v) == 2}
    assert found < {(i, "x" * 100) for i in range(1000)}
    assert 1000 - 4096 // 100 <= len(found) < 1000


@pytest.mark.parametrize(
    ("at", "value"),
    [(0, b"X"), (16, b"\x10\x01"), (18, b"\x03"), (19, b"\x00"), (21, b"\x41"), (44, b"\x01"), (59, b"\x07")],
)
def test_a_header_that_sqlite_could_not_have_written_is_named(tmp_path: Path, at: int, value: bytes) -> None:
    path = tmp_path / "a.db"
    with raw(path) as connection:
        connection.execute("CREATE TABLE t (a)")
    data = bytearray(path.read_bytes())
    assert isinstance(read_header(path), Header)
    data[at : at + len(value)] = value
    path.write_bytes(data)
    assert isinstance(read_header(path), str)
    path.write_bytes(data[:99])
    assert isinstance(read_header(path), str)
