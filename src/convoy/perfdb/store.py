"""The open database file: shared by many threads and processes, reopened when it is replaced, repaired when it is damaged.

Three rules make it safe. Every writer, and every process that opens or repairs the file, holds one lock among all processes,
so no file is replaced during a write. Each write is one transaction. If the file becomes unusable (read-only, disk full,
newer version), the session continues in memory with everything that could be read, and one warning.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, suppress
from pathlib import Path
from typing import Final, TypeVar

from convoy.errors import DatabaseError
from convoy.perfdb import sql
from convoy.perfdb.faults import FILE_ERRORS, FileReplacedError, ForeignFileError, is_damage, is_unwritable
from convoy.perfdb.location import on_shared_file_system
from convoy.perfdb.repair import FileContents, open_sound, read_contents, replace_damaged, was_database
from convoy.untrusted import escape_controls

T = TypeVar("T")
Query = Callable[[sqlite3.Connection], T]

_ATTEMPTS: Final = 5
"""A damaged file is repaired once and a replaced one reopened once or twice; more attempts mean that it is damaged again and
again."""

_inherited: list[sqlite3.Connection] = []
"""Connections that a forked child must neither use nor close (https://sqlite.org/howtocorrupt.html, section 2.6)."""


class DatabaseFile:
    """A connection to one database file, or to memory.

    Args:
        path: the file; None for a database in memory.
        create: whether to create a missing file; else the session works in memory.
        timeout_s: how long to wait for other processes.

    Attributes:
        in_memory: whether the session works in memory, as requested or because the file cannot be used.
        warnings: what went wrong with the file, one line for each event.
    """

    def __init__(self, path: Path | None, *, create: bool = True, timeout_s: float = 30.0) -> None:
        self.path, self.in_memory, self.warnings = path, False, list[str]()
        self._timeout_s, self._lock, self._pid = timeout_s, threading.RLock(), os.getpid()
        self._connection: sqlite3.Connection | None = None
        self._identity, self._closed = (0, 0), False
        self._save_at_close, self._unsaved = False, list[Query[object]]()
        if path is None or (not create and not path.exists()):
            self._use_memory(FileContents())
        else:
            self._open(path)

    def read(self, work: Query[T]) -> T:
        """Run queries. A damaged file is repaired, and the queries run again."""
        return self._run(work)

    def write(self, work: Query[T]) -> T:
        """Run statements in one transaction. If the file is unusable, they run in memory, and again on the file at `close`."""
        with self._thread_lock():
            result = self._run(lambda connection: self._commit(connection, work))
            if self._save_at_close:
                self._unsaved.append(work)
            return result

    def shrink(self) -> None:
        """Return the space of deleted rows, unless another process uses the file at this moment."""
        with self._thread_lock():
            try:
                sql.shrink(self._current())
            except sqlite3.Error as error:
                if not is_unwritable(error):
                    raise

    def close(self) -> None:
        """Close the file, after a last try to write what is only in memory. May be called twice."""
        with self._thread_lock():
            self._closed = True
            if self._connection is not None:
                self._connection.close()
                self._connection = None
            if self._unsaved and self.path is not None:
                self._save(self.path)

    def _commit(self, connection: sqlite3.Connection, work: Query[T]) -> T:
        if self.in_memory or self.path is None:
            with sql.transaction(connection):
                return work(connection)
        with sql.exclusive(_lock_path(self.path), self._timeout_s):
            if self._identity != _identity(self.path):
                raise FileReplacedError
            with sql.transaction(connection):
                return work(connection)

    def _run(self, work: Query[T]) -> T:
        with self._thread_lock():
            for _ in range(_ATTEMPTS):
                try:
                    return work(self._current())
                except FileReplacedError:
                    continue
                except (*FILE_ERRORS, OSError) as error:
                    if self.in_memory or self.path is None:
                        raise
                    self._recover(self.path, error)
            raise DatabaseError(f"{self.path} is damaged again and again; does another program write to it?")

    def _thread_lock(self) -> AbstractContextManager[object]:
        """The lock among threads, created again in a forked child: a thread of the parent may have held it at the fork."""
        if self._pid != os.getpid():
            self._pid, self._lock = os.getpid(), threading.RLock()
            if self._connection is not None and not self.in_memory:
                _inherited.append(self._connection)
                self._connection = None
        return self._lock

    def _current(self) -> sqlite3.Connection:
        """The connection to the file that is at the path now."""
        if self._closed:
            raise DatabaseError(f"{self.path or 'the database in memory'} has been closed: open it again to use it.")
        if self.path is not None and not self.in_memory:
            if self._connection is not None and self._identity != _identity(self.path):
                self._connection.close()
                self._connection = None
            if self._connection is None:
                self._open(self.path)
        assert self._connection is not None
        return self._connection

    def _open(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _check_not_foreign(path)
            with sql.exclusive(_lock_path(path), self._timeout_s):
                try:
                    self._connection = self._sound(path, self._timeout_s)
                except FILE_ERRORS as error:
                    if not is_damage(error):
                        raise
                    self._repair(path, error)
                self._identity = _identity(path)
        except ForeignFileError as reason:
            self._use_memory(FileContents())
            self._warn(f"{path} is left as it is ({reason}); results of this session are kept in memory alone.")
        except (*FILE_ERRORS, OSError) as error:
            self._continue_in_memory(path, error)

    def _sound(self, path: Path, timeout_s: float) -> sqlite3.Connection:
        return open_sound(path, write_ahead=not on_shared_file_system(path), timeout_s=timeout_s)

    def _repair(self, path: Path, error: Exception) -> None:
        bad, contents = replace_damaged(path)
        self._connection = self._sound(path, self._timeout_s)
        self._warn(
            f"{path} was damaged ({escape_controls(str(error), one_line=True)}): {len(contents.records)} rows were saved, "
            f"the bad file is now {bad.name}."
        )

    def _recover(self, path: Path, error: Exception) -> None:
        """After a failed query: repair the file, or continue in memory; other errors are Convoy's own and are raised."""
        if not is_damage(error):
            self._continue_in_memory(path, error)
            return
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        try:
            with sql.exclusive(_lock_path(path), self._timeout_s):
                # Unless another process has repaired it meanwhile.
                if self._identity == _identity(path):
                    self._repair(path, error)
                    self._identity = _identity(path)
        except (*FILE_ERRORS, OSError) as worse:
            self._continue_in_memory(path, worse)

    def _continue_in_memory(self, path: Path, error: Exception) -> None:
        """Continue in memory, with everything that can be read of a file that cannot be written."""
        if not (is_unwritable(error) or is_damage(error)):
            raise error
        contents, saved = FileContents(), True
        with suppress(OSError):
            try:
                contents = read_contents(path)
            except ForeignFileError:
                saved = False
        self._use_memory(contents)
        self._save_at_close = saved
        self._warn(
            f"{path} cannot be used for writing ({escape_controls(str(error), one_line=True)}): "
            f"{len(contents.records)} rows were read from it; new results are kept in memory, "
            "and written when the session ends if that is possible by then."
        )

    def _use_memory(self, contents: FileContents) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection, self.in_memory = sql.connect(":memory:"), True
        sql.create(self._connection)
        contents.write(self._connection)

    def _save(self, path: Path) -> None:
        # The warning about continuing in memory has already named the cause.
        try:
            with sql.exclusive(_lock_path(path), 1.0), closing(self._sound(path, 1.0)) as connection:
                for work in self._unsaved:
                    with sql.transaction(connection):
                        work(connection)
        except (*FILE_ERRORS, ForeignFileError, OSError) as error:
            if isinstance(error, sqlite3.Error) and not (is_damage(error) or is_unwritable(error)):
                raise

    def _warn(self, line: str) -> None:
        self.warnings.append(line)


def _lock_path(path: Path) -> Path:
    return path.with_name(path.name + ".lock")


def _check_not_foreign(path: Path) -> None:
    """Refuse to move a file aside that Convoy never wrote, such as weights that were given as `--db` by mistake.

    A path that Convoy has used has a lock file, which stays there.

    Raises:
        ForeignFileError: it is no database, and was none.
    """
    if path.is_file() and not _lock_path(path).exists() and not was_database(path):
        raise ForeignFileError("it is no database")


def _identity(path: Path) -> tuple[int, int]:
    """Device and inode: another pair is another file. (0, 0) if there is none."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return (0, 0)
    return found.st_dev, found.st_ino
