"""The SQL statements of the database: functions that run them on a connection.

Functions raise `DamagedFileError` for damaged contents and let `sqlite3.Error` through; `faults` classifies those.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final

from convoy.errors import InputError
from convoy.perfdb.faults import DamagedFileError
from convoy.perfdb.record import COLUMNS, KEY_COLUMNS, ColumnValue, seal_pair, seal_row
from convoy.perfdb.row import Measurement
from convoy.perfdb.schema import APPLICATION_ID, MIGRATIONS, SCHEMA, SCHEMA_VERSION
from convoy.perfdb.stored import STORED_COLUMNS, verified_pair, verified_record, verified_rows

PAGE_BYTES: Final = 4096  # of new files

_NAMES: Final = ", ".join(STORED_COLUMNS)
_KEYS: Final = ", ".join(KEY_COLUMNS)
_UPDATES: Final = ", ".join(f"{name} = excluded.{name}" for name in STORED_COLUMNS if name not in KEY_COLUMNS)
# All parts of the statements below are constants of this package; user input is only passed as parameters.
_PUT: Final = (
    f"INSERT INTO measurements ({_NAMES}) VALUES ({', '.join('?' * len(STORED_COLUMNS))}) "  # noqa: S608
    f"ON CONFLICT ({_KEYS}) DO UPDATE SET {_UPDATES}"
)
_PUT_NEWER: Final = _PUT + " WHERE excluded.date > measurements.date"
_SELECT: Final = f"SELECT {_NAMES} FROM measurements"  # noqa: S608
_FILTERS: Final = {
    "problem": "instr(problem, ?) > 0",
    "engine": "engine = ?",
    "status": "status = ?",
    "target": "substr(target, 1, length(?)) = ?",
}
_PAIRS: Final = {"texts": ("key", "text"), "targets": ("digest", "json"), "plans": ("key", "json")}
_MOST_PARAMETERS: Final = 500  # SQLite 3.31 takes 999


_SETTINGS: Final = (f"page_size = {PAGE_BYTES}", "secure_delete = ON", "cell_size_check = ON", "trusted_schema = OFF")


def connect(path: Path | str, timeout_s: float = 30.0) -> sqlite3.Connection:
    """Open a connection that commits each statement by itself and may be used by any thread (one at a time)."""
    connection = sqlite3.connect(path, timeout=timeout_s, isolation_level=None, check_same_thread=False)
    try:
        for pragma in _SETTINGS:
            connection.execute("PRAGMA " + pragma)
    except BaseException:  # everything, an interrupt too: the connection must be closed
        connection.close()
        raise
    connection.text_factory = _text
    return connection


def connect_read_only(path: Path, *, immutable: bool = False) -> sqlite3.Connection:
    """Open an existing file only for reading; `immutable`: without locks and without creating files beside it."""
    location = path.as_uri() + ("?immutable=1" if immutable else "?mode=ro")
    connection = sqlite3.connect(location, uri=True, timeout=5.0, isolation_level=None)
    connection.text_factory = _text
    return connection


def _text(raw: bytes) -> str:
    """Damaged text becomes other text, which the row's seal detects, instead of an exception in the middle of a query."""
    return raw.decode("utf-8", "replace")


@contextmanager
def exclusive(path: Path, timeout_s: float = 30.0) -> Generator[None]:
    """Hold the lock at `path` among all processes and threads; the kernel releases it if the process dies.

    It is SQLite's own lock on a side file that stays empty: it works wherever SQLite works, also between threads.
    """
    with closing(sqlite3.connect(path, timeout=timeout_s, isolation_level=None)) as lock:
        lock.execute("BEGIN EXCLUSIVE")
        yield


@contextmanager
def transaction(connection: sqlite3.Connection) -> Generator[None]:
    """Commit everything, or roll back on any exception, an interrupt included."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:  # everything, an interrupt too: nothing may stay half written
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def create(connection: sqlite3.Connection) -> None:
    """Create the tables of the present version in an empty database."""
    with transaction(connection):
        _run_script(connection, SCHEMA)
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


def migrate(connection: sqlite3.Connection, version: int) -> None:
    """Migrate the tables of an older version to the present one, completely or not at all."""
    with transaction(connection):
        for script in MIGRATIONS[version - 1 :]:
            _run_script(connection, script)
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


def _run_script(connection: sqlite3.Connection, script: str) -> None:
    # Connection.executescript would commit the open transaction.
    for statement in filter(None, map(str.strip, script.split(";\n"))):
        connection.execute(statement)


def schema_version(connection: sqlite3.Connection) -> int:
    """The file's schema version; 0 for a file without tables."""
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def application_id(connection: sqlite3.Connection) -> int:
    """The id of the program that created the file."""
    return int(connection.execute("PRAGMA application_id").fetchone()[0])


def is_empty(connection: sqlite3.Connection) -> bool:
    """Whether the file holds no tables."""
    return connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0


def has_measurements(connection: sqlite3.Connection) -> bool:
    """Whether a file has a table of measurements, by the columns of its key."""
    names = {str(column[1]) for column in connection.execute("PRAGMA table_info(measurements)")}
    return names.issuperset(KEY_COLUMNS)


def layout(connection: sqlite3.Connection) -> list[Any]:
    """Columns of Convoy's tables as SQLite understands them: equal for two files of one schema version."""
    return [connection.execute(f"PRAGMA table_info({table})").fetchall() for table in ("measurements", *_PAIRS)]


def check(connection: sqlite3.Connection) -> None:
    """Raise DamagedFileError unless pages, trees and indices are intact (40 ms for 40,000 rows).

    Reading rows checks their seals.
    """
    found = connection.execute("PRAGMA integrity_check(1)").fetchone()[0]
    if found != "ok":
        raise DamagedFileError(str(found).replace("\n", " "))


def set_journal(connection: sqlite3.Connection, *, write_ahead: bool) -> str:
    """Choose write-ahead logging or the rollback journal; returns the mode that SQLite could use on this file system."""
    mode = str(connection.execute("PRAGMA journal_mode = " + ("WAL" if write_ahead else "DELETE")).fetchone()[0])
    # A commit survives the process in both modes; only in WAL mode may the flush to disk wait for a checkpoint.
    connection.execute("PRAGMA synchronous = " + ("NORMAL" if mode == "wal" else "FULL"))
    return mode


def journal(connection: sqlite3.Connection) -> str:
    """The journal mode in use."""
    return str(connection.execute("PRAGMA journal_mode").fetchone()[0])


def put_records(
    connection: sqlite3.Connection, records: Iterable[Mapping[str, Any]], *, newer_only: bool = False
) -> int:
    """Write rows; a row with the same key is replaced (with `newer_only`: only by a later date). Returns the number written."""
    statement, written = _PUT_NEWER if newer_only else _PUT, 0
    for record in records:
        sealed = {**record, "seal": seal_row(record)}
        written += connection.execute(statement, [sealed[name] for name in STORED_COLUMNS]).rowcount
    return written


def put_pairs(connection: sqlite3.Connection, table: str, pairs: Mapping[str, str]) -> None:
    """Write rows of `texts`, `targets` or `plans`; a row with the same key is replaced."""
    key, text = _PAIRS[table]
    statement = (
        f"INSERT INTO {table} ({key}, {text}, seal) VALUES (?, ?, ?) "  # noqa: S608
        f"ON CONFLICT ({key}) DO UPDATE SET {text} = excluded.{text}, seal = excluded.seal"
    )
    connection.executemany(statement, ((k, v, seal_pair(table, k, v)) for k, v in pairs.items()))


def lookup(connection: sqlite3.Connection, problem: str, target: str, protocol: str) -> list[Measurement]:
    """All rows of a problem on a target by a protocol."""
    statement = _SELECT + " WHERE problem = ? AND target = ? AND protocol = ? ORDER BY engine, version, knobs"
    return verified_rows(connection.execute(statement, (problem, target, protocol)))


def select(connection: sqlite3.Connection, filters: Mapping[str, str], limit: int | None = None) -> list[Measurement]:
    """Rows that pass all filters, grouped by target and problem, the fastest first, failures last."""
    where, values = _where(filters)
    order = " ORDER BY target, problem, protocol, status <> 'ok', median_us, engine, version, knobs LIMIT ?"
    return verified_rows(connection.execute(_SELECT + where + order, (*values, -1 if limit is None else limit)))


def select_records(connection: sqlite3.Connection) -> Iterator[dict[str, ColumnValue]]:
    """All rows as stored, including those that this version of Convoy does not understand."""
    return (verified_record(found) for found in connection.execute(_SELECT + " ORDER BY rowid"))


def count(connection: sqlite3.Connection, filters: Mapping[str, str]) -> int:
    """How many rows pass all filters."""
    where, values = _where(filters)
    found = connection.execute("SELECT count(*) FROM measurements" + where, values)  # noqa: S608
    return int(found.fetchone()[0])


def count_by(connection: sqlite3.Connection, column: str) -> dict[str, int]:
    """Number of rows by the value of one column."""
    if column not in COLUMNS:
        raise InputError("column", column, "one of " + ", ".join(COLUMNS))
    statement = f"SELECT {column}, count(*) FROM measurements GROUP BY {column} ORDER BY {column}"  # noqa: S608
    return {str(value): int(number) for value, number in connection.execute(statement)}


def delete(connection: sqlite3.Connection, filters: Mapping[str, str]) -> int:
    """Delete the rows that pass all filters; without filters, the texts, targets and plans too. Returns the number of rows."""
    where, values = _where(filters)
    removed = connection.execute("DELETE FROM measurements" + where, values).rowcount  # noqa: S608
    if not filters:
        for table in _PAIRS:
            connection.execute(f"DELETE FROM {table}")  # noqa: S608
    return removed


def shrink(connection: sqlite3.Connection) -> None:
    """Return the space of deleted rows to the file system."""
    connection.execute("VACUUM")


def _where(filters: Mapping[str, str]) -> tuple[str, tuple[str, ...]]:
    terms = [_FILTERS[name] for name in filters]
    values = [value for name, value in filters.items() for _ in range(_FILTERS[name].count("?"))]
    return (" WHERE " + " AND ".join(terms) if terms else ""), tuple(values)


def select_pairs(connection: sqlite3.Connection, table: str, key: str | None = None) -> dict[str, str]:
    """Rows of `texts`, `targets` or `plans`: all, or the one with a key."""
    column, text = _PAIRS[table]
    where, values = (f" WHERE {column} = ?", (key,)) if key is not None else ("", ())
    statement = f"SELECT {column}, {text}, seal FROM {table}{where} ORDER BY {column}"  # noqa: S608
    return dict(verified_pair(table, found) for found in connection.execute(statement, values))


def delete_plan(connection: sqlite3.Connection, key: str) -> None:
    """Delete a plan, if it is there."""
    connection.execute("DELETE FROM plans WHERE key = ?", (key,))


def plan_keys(connection: sqlite3.Connection) -> list[str]:
    """The keys of all plans, the oldest first."""
    return [str(key) for (key,) in connection.execute("SELECT key FROM plans ORDER BY rowid")]


def drop_oldest_plans(connection: sqlite3.Connection, kept: int) -> int:
    """Delete all plans but the last ones that were added; returns how many."""
    oldest = "SELECT rowid FROM plans ORDER BY rowid DESC LIMIT -1 OFFSET ?"
    return connection.execute(f"DELETE FROM plans WHERE rowid IN ({oldest})", (kept,)).rowcount  # noqa: S608 - a constant


def sum_of_rows(connection: sqlite3.Connection, problems: Sequence[str] | None) -> tuple[int, int]:
    """How many rows these problems have, or all of them, and the sum of their seals: equal sums, equal rows."""
    statement = "SELECT count(*), coalesce(sum(seal), 0) FROM measurements"
    rows = seals = 0
    if problems is None:
        rows, seals = connection.execute(statement).fetchone()
        return int(rows), int(seals)
    for begin in range(0, len(problems), _MOST_PARAMETERS):
        part = problems[begin : begin + _MOST_PARAMETERS]
        places = ", ".join("?" * len(part))
        found = connection.execute(f"{statement} WHERE problem IN ({places})", tuple(part)).fetchone()
        rows, seals = rows + int(found[0]), seals + int(found[1])
    return rows, seals
