"""Classifies what can be wrong with a database file by what has to be done about it."""

from __future__ import annotations

import sqlite3
from typing import Final


class DamagedFileError(Exception):
    """The file's contents are not what was written: its good rows move to a new file, and it is renamed."""


class ForeignFileError(Exception):
    """The file is whole, but Convoy must not change it: it belongs to a newer Convoy or to another program."""


class FileReplacedError(Exception):
    """Another process has put a new file in this one's place."""


FILE_ERRORS: Final = (DamagedFileError, sqlite3.Error, UnicodeDecodeError)
"""Exceptions of a query that may be caused by the file. The last one occurs when SQLite's own error message quotes a damaged
name."""

_DAMAGED: Final = {
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_NOTADB,
    # Convoy's statements are constants and valid for the schema: if SQLite rejects one, the schema has changed.
    sqlite3.SQLITE_ERROR,
    sqlite3.SQLITE_CONSTRAINT,
}
_UNWRITABLE: Final = {
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_AUTH,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_NOLFS,
    # Locked by another process for longer than the timeout.
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_PROTOCOL,
}


def _primary_code(error: BaseException) -> int:
    """The low byte of a result code (https://sqlite.org/rescode.html); -1 for an error that SQLite did not raise."""
    code = getattr(error, "sqlite_errorcode", -1)
    return code & 0xFF if isinstance(code, int) and code >= 0 else -1


def is_damage(error: BaseException) -> bool:
    """Whether an exception means that the file's contents are damaged."""
    if isinstance(error, DamagedFileError | UnicodeDecodeError):
        return True
    return isinstance(error, sqlite3.Error) and _primary_code(error) in _DAMAGED


def is_unwritable(error: BaseException) -> bool:
    """Whether an exception means that the file cannot be used now: read-only, disk full, locked, unreachable."""
    return isinstance(error, OSError) or (isinstance(error, sqlite3.Error) and _primary_code(error) in _UNWRITABLE)
