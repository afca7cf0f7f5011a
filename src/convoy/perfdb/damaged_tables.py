"""Reads the rows of a damaged SQLite file that SQLite itself can still read."""

from __future__ import annotations

import sqlite3
from contextlib import suppress
from typing import Any, Final

from convoy.perfdb.faults import FILE_ERRORS
from convoy.perfdb.stored import STORED_COLUMNS

_TABLES: Final = {
    "measurements": STORED_COLUMNS,
    "texts": ("key", "text", "seal"),
    "targets": ("digest", "json", "seal"),
    "plans": ("key", "json", "seal"),
}

MIN_ROW_BYTES: Final = 64
"""No row is smaller: a file's size bounds the rowids that are looked up one by one."""


def readable_rows(connection: sqlite3.Connection, table: str) -> list[tuple[Any, ...]]:
    """The rows of a table, in the order of `STORED_COLUMNS` for measurements; none if the table is gone.

    The table is read from its first row up to the first damaged page, from its last row down to one, and row by row between.
    Columns that an older version lacks are left out at the end.
    """
    with suppress(*FILE_ERRORS):
        connection.execute("PRAGMA writable_schema = ON")  # else SQLite refuses a truncated file as a whole
        present = {str(column[1]) for column in connection.execute(f"PRAGMA table_info({table})")}
        names = ", ".join(name for name in _TABLES[table] if name in present)
        if names:
            return _rows(connection, f"SELECT rowid, {names} FROM {table}")  # noqa: S608 - constants alone
    return []


def _rows(connection: sqlite3.Connection, select: str) -> list[tuple[Any, ...]]:
    found: dict[int, tuple[Any, ...]] = {}
    if not _scan(connection, f"{select} ORDER BY rowid", found):
        first = max(found, default=0) + 1
        _scan(connection, f"{select} ORDER BY rowid DESC", found)
        most = first + _file_bytes(connection) // MIN_ROW_BYTES
        last = min((rowid for rowid in found if rowid > first), default=most)
        for rowid in range(first, min(last, most)):
            with suppress(*FILE_ERRORS):
                row = connection.execute(f"{select} WHERE rowid = ?", (rowid,)).fetchone()
                if row is not None:
                    found[rowid] = row[1:]
    return list(found.values())


def _file_bytes(connection: sqlite3.Connection) -> int:
    pages, page_bytes = (connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "page_size"))
    return int(pages) * int(page_bytes)


def _scan(connection: sqlite3.Connection, statement: str, found: dict[int, tuple[Any, ...]]) -> bool:
    """Add rows until the first error; whether there was none."""
    try:
        for row in connection.execute(statement):
            found[row[0]] = row[1:]
    except FILE_ERRORS:
        return False
    return True
