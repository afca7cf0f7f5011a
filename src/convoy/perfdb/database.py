"""Database: measurements in one SQLite file. The one module that holds SQL.

Every row is sealed with a checksum, so that a damaged file never gives a wrong figure. A file that cannot be used is moved
aside with one warning, and what can be read of it is kept; where nothing can be written, the session works in memory.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from convoy.errors import InputError
from convoy.perfdb.record import (
    COLUMNS,
    KEY_COLUMNS,
    clip_reason,
    read_record,
    read_text,
    seal_pair,
    seal_row,
    to_record,
)
from convoy.perfdb.row import Measurement

SCHEMA_VERSION: Final = 1
BUSY_MS: Final = 30_000
"""How long a writer waits for another process: sixteen writers at once are through in far less."""

_SQL_TYPES: Final = {str: "TEXT", int: "INTEGER", float: "REAL", bool: "INTEGER"}
_MEASUREMENTS = ", ".join(f"{name} {_SQL_TYPES[kind]} NOT NULL" for name, kind in COLUMNS.items())
_SCHEMA: Final = (
    f"CREATE TABLE IF NOT EXISTS measurements ({_MEASUREMENTS}, seal INTEGER NOT NULL, PRIMARY KEY ({', '.join(KEY_COLUMNS)}))",
    "CREATE TABLE IF NOT EXISTS texts (key TEXT PRIMARY KEY, text TEXT NOT NULL, seal INTEGER NOT NULL)",
)
_PLACES = ", ".join("?" * (len(COLUMNS) + 1))
_PUT_ROW: Final = f"INSERT OR REPLACE INTO measurements ({', '.join(COLUMNS)}, seal) VALUES ({_PLACES})"  # noqa: S608 - column names are constants
_PUT_TEXT: Final = "INSERT OR REPLACE INTO texts (key, text, seal) VALUES (?, ?, ?)"
_SELECT: Final = f"SELECT {', '.join(COLUMNS)}, seal FROM measurements"  # noqa: S608 - column names are constants


def default_path() -> Path:
    """The database in the user's cache folder."""
    try:
        from platformdirs import user_cache_path

        return user_cache_path("convoy") / "perf.db"
    except ImportError:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "convoy" / "perf.db"


class Database:
    """Measurements that outlive the session. Safe for several threads and processes; every `put` is one transaction.

    Attributes:
        path: the file; None where the session works in memory.
        warnings: what the user should know, one line each.
    """

    def __init__(self, connection: sqlite3.Connection, path: Path | None, warnings: list[str]) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self.path = path
        self.warnings = warnings

    @classmethod
    def open(cls, path: Path | None = None) -> Database:
        """Open or make the database; a damaged file is moved aside, and its good rows are taken over.

        Args:
            path: the file; None: the user's cache folder.
        """
        path = path or default_path()
        warnings: list[str] = []
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            warnings.append(
                f"database: {path.parent} cannot be made ({error.strerror}); results are kept for this run only"
            )
            return cls(_prepare(_connect(":memory:")), None, warnings)
        try:
            return cls(_open_file(path), path, warnings)
        except _NewerError as error:
            warnings.append(f"database: {path} was written by a newer Convoy ({error}); it is left alone")
        except sqlite3.OperationalError as error:
            if path.exists() and not _is_damage(error):
                return cls._read_only(path, warnings, error)
            return cls._replace(path, warnings)
        except sqlite3.DatabaseError:
            return cls._replace(path, warnings)
        return cls(_prepare(_connect(":memory:")), None, warnings)

    @classmethod
    def open_read_only(cls, path: Path) -> Database:
        """Another database, for reading alone; raises InputError where it is none."""
        memory = _prepare(_connect(":memory:"))
        try:
            with contextlib.closing(_connect(f"{path.absolute().as_uri()}?mode=ro")) as source:
                _copy_rows(source, memory)
        except sqlite3.Error as error:
            raise InputError("path", str(path), "a database of measurements", str(error)) from error
        return cls(memory, None, [])

    @classmethod
    def _read_only(cls, path: Path, warnings: list[str], error: sqlite3.Error) -> Database:
        """What cannot be written is read into memory."""
        warnings.append(f"database: {path} cannot be written ({error}); new results are kept for this run only")
        memory = _prepare(_connect(":memory:"))
        with (
            contextlib.suppress(sqlite3.Error),
            contextlib.closing(_connect(f"{path.absolute().as_uri()}?immutable=1")) as source,
        ):
            _copy_rows(source, memory)
        return cls(memory, None, warnings)

    @classmethod
    def _replace(cls, path: Path, warnings: list[str]) -> Database:
        """Move a damaged file aside and start anew with the rows that can still be read."""
        aside = path.with_name(f"{path.name}.bad-{dt.datetime.now(dt.UTC):%Y%m%dT%H%M%S}")
        try:
            path.replace(aside)
            for suffix in ("-wal", "-shm"):
                path.with_name(path.name + suffix).unlink(missing_ok=True)
            connection = _open_file(path)
        except (OSError, sqlite3.Error) as error:
            warnings.append(f"database: {path} is damaged and cannot be replaced ({error}); this run works in memory")
            return cls(_prepare(_connect(":memory:")), None, warnings)
        saved = 0
        with (
            contextlib.suppress(sqlite3.Error),
            contextlib.closing(_connect(f"{aside.absolute().as_uri()}?immutable=1")) as source,
        ):
            saved = _copy_rows(source, connection)
        warnings.append(f"database: {path} was damaged; it was moved to {aside.name}, {saved} rows were saved")
        return cls(connection, path, warnings)

    def __enter__(self) -> Database:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    def lookup(self, problem: str, target: str, protocol: str) -> list[Measurement]:
        """Rows of a problem on a target by a protocol; rows whose seal is broken are passed over."""
        where = " WHERE problem = ? AND target = ? AND protocol = ?"
        return list(self._rows(where, (problem, target, protocol)))

    def rows(self, **wanted: str) -> Iterator[Measurement]:
        """All rows whose columns have the values given.

        Raises:
            InputError: no such column.
        """
        for name in wanted:
            if name not in COLUMNS:
                raise InputError("column", name, "one of " + ", ".join(COLUMNS))
        where = " AND ".join(f"{name} = ?" for name in wanted)
        yield from self._rows(f" WHERE {where}" if where else "", tuple(wanted.values()))

    def put(self, rows: Sequence[Measurement], texts: Mapping[str, str] | None = None) -> int:
        """Keep rows, with the texts of subgraph problems; a row of the same key is replaced. Returns how many were kept.

        A full disk or a file that cannot be written costs the rows and one warning, never the session.
        """
        records = [to_record(_clipped(row)) for row in rows]
        values = [(*record.values(), seal_row(record)) for record in records]
        pairs = [(key, text, seal_pair("texts", key, text)) for key, text in (texts or {}).items()]
        try:
            with self._lock, _transaction(self._connection):
                self._connection.executemany(_PUT_ROW, values)
                self._connection.executemany(_PUT_TEXT, pairs)
        except sqlite3.Error as error:
            line = f"database: results could not be written ({error}); tuning goes on without keeping them"
            if line not in self.warnings:
                self.warnings.append(line)
            return 0
        return len(values)

    def text(self, key: str) -> str | None:
        """The text of a subgraph problem, or None."""
        with self._lock:
            found = self._connection.execute("SELECT text FROM texts WHERE key = ?", (key,)).fetchone()
        if found is None:
            return None
        try:
            return read_text(key, found[0])[1]
        except InputError:
            return None

    def info(self) -> dict[str, Any]:
        """Where the database lies and what is in it: rows by status and by target."""
        with self._lock:
            statuses = self._connection.execute("SELECT status, count(*) FROM measurements GROUP BY status").fetchall()
            targets = self._connection.execute("SELECT target, count(*) FROM measurements GROUP BY target").fetchall()
        return {
            "path": str(self.path) if self.path else "(in memory)",
            "schema_version": SCHEMA_VERSION,
            "rows": sum(count for _, count in statuses),
            "statuses": dict(sorted(statuses)),
            "targets": dict(sorted(targets)),
            "size_bytes": self.path.stat().st_size if self.path and self.path.exists() else 0,
        }

    def clear(self, **wanted: str) -> int:
        """Remove rows whose columns have the values given (all, where none are); returns how many."""
        for name in wanted:
            if name not in COLUMNS:
                raise InputError("column", name, "one of " + ", ".join(COLUMNS))
        where = " AND ".join(f"{name} = ?" for name in wanted)
        statement = "DELETE FROM measurements" + (f" WHERE {where}" if where else "")
        with self._lock, _transaction(self._connection):
            return self._connection.execute(statement, tuple(wanted.values())).rowcount

    def _rows(self, where: str, values: tuple[str, ...]) -> Iterator[Measurement]:
        try:
            with self._lock:
                found = self._connection.execute(_SELECT + where, values).fetchall()
        except sqlite3.DatabaseError as error:
            self.warnings.append(f"database: {error}; what it holds is not used")
            return
        for values_ in found:
            row = _unseal(values_)
            if row is not None:
                yield row


class _NewerError(Exception):
    """The file has a schema of a later version."""


def _connect(location: str) -> sqlite3.Connection:
    uri = location.startswith("file:")
    return sqlite3.connect(location, timeout=BUSY_MS / 1e3, check_same_thread=False, isolation_level=None, uri=uri)


def _open_file(path: Path) -> sqlite3.Connection:
    connection = _connect(str(path))
    try:
        found = connection.execute("PRAGMA user_version").fetchone()[0]
        if found > SCHEMA_VERSION:
            raise _NewerError(f"schema {found}, this one reads {SCHEMA_VERSION}")
        if found and connection.execute("PRAGMA quick_check(1)").fetchone()[0] != "ok":
            raise sqlite3.DatabaseError("damaged")
        return _prepare(connection)
    except (sqlite3.Error, _NewerError):
        connection.close()
        raise


def _prepare(connection: sqlite3.Connection) -> sqlite3.Connection:
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")
    with _transaction(connection):
        for statement in _SCHEMA:
            connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    return connection


@contextlib.contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        with contextlib.suppress(sqlite3.Error):  # the disk may be full: SQLite has rolled back by itself then
            connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


def _copy_rows(source: sqlite3.Connection, into: sqlite3.Connection) -> int:
    """Take over every row whose seal is whole."""
    saved = 0
    cursor = source.execute(_SELECT)
    with _transaction(into):
        while True:
            try:
                values = cursor.fetchone()
            except sqlite3.DatabaseError:
                break
            if values is None:
                break
            if _unseal(values) is not None:
                into.execute(_PUT_ROW, values)
                saved += 1
    return saved


def _unseal(values: Sequence[Any]) -> Measurement | None:
    """The measurement of a stored row; None where it is not what was written."""
    record = dict(zip(COLUMNS, values[:-1], strict=True))
    try:
        for name, kind in COLUMNS.items():
            if kind is bool:
                record[name] = bool(record[name])
        return read_record(record) if seal_row(record) == values[-1] else None
    except (InputError, TypeError, ValueError):
        return None


def _is_damage(error: sqlite3.Error) -> bool:
    return getattr(error, "sqlite_errorcode", None) in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def _clipped(row: Measurement) -> Measurement:
    import dataclasses

    return dataclasses.replace(row, reason=clip_reason(row.reason))
