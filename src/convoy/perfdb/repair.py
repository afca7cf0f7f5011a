"""Opens a database file with all checks, and replaces a damaged file by a new one with its readable rows."""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
import struct
import tempfile
from collections.abc import Generator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from convoy.perfdb import sql
from convoy.perfdb.damaged_tables import readable_rows
from convoy.perfdb.faults import FILE_ERRORS, DamagedFileError, ForeignFileError, is_damage
from convoy.perfdb.record import ColumnValue
from convoy.perfdb.sqlite_header import HEADER_BYTES, MAGIC, SqliteHeader, read_header
from convoy.perfdb.stored import verified_pair, verified_record
from convoy.untrusted import escape_controls, read_at_most

MAX_BYTES: Final = 256 << 20
"""Most bytes that are read of a damaged file: all shipped results of a GPU take 12 MB as text."""

_BESIDE = ("-wal", "-shm", "-journal")
"""Suffixes of the files that SQLite keeps beside a database; they belong to its contents and move with it."""


@dataclass(slots=True)
class FileContents:
    """The contents of a database file: rows as records (oldest first), texts by problem, targets by digest, plans by key.

    `damage` says what is wrong with the file; empty for a whole file.
    """

    records: list[dict[str, ColumnValue]] = field(default_factory=list[dict[str, ColumnValue]])
    texts: dict[str, str] = field(default_factory=dict[str, str])
    targets: dict[str, str] = field(default_factory=dict[str, str])
    plans: dict[str, str] = field(default_factory=dict[str, str])
    damage: str = ""

    def write(self, connection: sqlite3.Connection) -> None:
        """Add everything to an open database in one transaction."""
        with sql.transaction(connection):
            sql.put_records(connection, self.records)
            sql.put_pairs(connection, "texts", self.texts)
            sql.put_pairs(connection, "targets", self.targets)
            sql.put_pairs(connection, "plans", self.plans)


def open_sound(path: Path, *, write_ahead: bool, timeout_s: float = 30.0) -> sqlite3.Connection:
    """Open the database at `path`, create or migrate it as needed, and check it. The caller holds the file's lock.

    Raises:
        DamagedFileError: the file is no database, or a damaged one.
        ForeignFileError: a whole database of a newer schema version or of another program; nothing was changed.
        sqlite3.Error: see `faults`.
    """
    if path.exists():
        _check_header(path)
        _check_writable(path)
    connection = sql.connect(path, timeout_s)
    try:
        _check_ours(connection)
        sql.check(connection)
        version = sql.schema_version(connection)
        if version == 0:
            sql.create(connection)
        elif version < sql.SCHEMA_VERSION:
            sql.migrate(connection, version)
        with closing(sql.connect(":memory:")) as new_file:
            sql.create(new_file)
            if sql.layout(connection) != sql.layout(new_file):
                raise DamagedFileError("its tables are not those of a performance database")
        sql.set_journal(connection, write_ahead=write_ahead)
    except BaseException:  # everything, an interrupt too: the connection must be closed
        connection.close()
        raise
    return connection


def _check_header(path: Path) -> None:
    log = _beside(path, "-wal")
    if path.stat().st_size == 0:
        if log.exists() and log.stat().st_size:
            # SQLite would treat the empty file as a new database and delete the log with all its rows.
            raise DamagedFileError("it is empty, but its write-ahead log is not")
        return
    header = read_header(path)
    if not isinstance(header, SqliteHeader):
        raise DamagedFileError(header)
    # Checked before SQLite opens the file, because opening it may change files.
    if header.application_id == sql.APPLICATION_ID and header.schema_version > sql.SCHEMA_VERSION:
        raise ForeignFileError(_newer(header.schema_version))


def was_database(path: Path) -> bool:
    """Whether a file is a database, or what damage may have left of one: empty, SQLite's first bytes, a log, or readable rows."""
    if path.stat().st_size == 0 or _beside(path, "-wal").exists():
        return True
    with path.open("rb") as file:
        if file.read(len(MAGIC)) == MAGIC:
            return True
    found = _readable_contents(path)
    return bool(found.records or found.texts or found.targets or found.plans)


def _check_writable(path: Path) -> None:
    # SQLite would open a read-only file too, create a log beside it, and fail at the first write.
    effective = os.access in os.supports_effective_ids
    if not os.access(path, os.W_OK, effective_ids=effective):
        raise PermissionError(errno.EACCES, "it is read-only", str(path))


def _check_ours(connection: sqlite3.Connection) -> None:
    version, empty = sql.schema_version(connection), sql.is_empty(connection)
    if version == 0 and empty:
        return
    marked = sql.application_id(connection) == sql.APPLICATION_ID
    if not marked and not sql.has_measurements(connection):
        raise ForeignFileError("it is another program's database")
    if marked and version > sql.SCHEMA_VERSION:
        raise ForeignFileError(_newer(version))
    # Version 1 had no mark.
    if empty or not (1 < version <= sql.SCHEMA_VERSION if marked else version == 1):
        raise DamagedFileError("its header and its tables do not agree")


def _newer(version: int) -> str:
    return (
        f"its schema version is {version}, this Convoy knows {sql.SCHEMA_VERSION}: install the newer Convoy to use it"
    )


def read_contents(path: Path) -> FileContents:
    """Everything that SQLite can read of a file, which is not changed: all of a whole file, the readable rows of a damaged one.

    Raises:
        ForeignFileError: a database of a newer schema version or of another program.
        OSError: the file cannot be read at all.
    """
    try:
        _check_header(path)
        log = _beside(path, "-wal")
        # Without a log, SQLite must create no files beside a file that Convoy must not change.
        with closing(sql.connect_read_only(path, immutable=not (log.exists() and log.stat().st_size))) as connection:
            _check_ours(connection)
            sql.check(connection)
            if sql.schema_version(connection) == sql.SCHEMA_VERSION:
                return FileContents(
                    list(sql.select_records(connection)),
                    sql.select_pairs(connection, "texts"),
                    sql.select_pairs(connection, "targets"),
                    sql.select_pairs(connection, "plans"),
                )
        return _readable_contents(path)  # an older version, which lacks columns or tables
    except FILE_ERRORS as error:
        # An undamaged file ends here too, if SQLite cannot create its shared memory in that folder.
        contents = _readable_contents(path)
        contents.damage = escape_controls(str(error), one_line=True) if is_damage(error) else ""
        return contents


def _readable_contents(path: Path) -> FileContents:
    """The rows that SQLite reads of a copy of the file and its log, each checked by its seal."""
    contents = FileContents()
    with suppress(*FILE_ERRORS), _opened_copy(path) as connection:
        for values in readable_rows(connection, "measurements"):
            with suppress(DamagedFileError):
                contents.records.append(verified_record(values))
        held = (("texts", contents.texts), ("targets", contents.targets), ("plans", contents.plans))
        for table, pairs in held:
            for values in readable_rows(connection, table):
                with suppress(DamagedFileError, ValueError):
                    key, text = verified_pair(table, values)
                    pairs[key] = text
    contents.records.sort(key=lambda record: str(record["date"]))
    return contents


@contextmanager
def _opened_copy(path: Path) -> Generator[sqlite3.Connection]:
    """A copy in memory; in a temporary file if there is a log, because a database in memory has none."""
    with path.open("rb") as file:
        data = _with_new_header(read_at_most(file, MAX_BYTES))
    log = _beside(path, "-wal")
    if not (log.exists() and log.stat().st_size):
        with closing(sql.connect(":memory:")) as connection:
            connection.deserialize(data)
            yield connection
        return
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy.db"
        copy.write_bytes(data)
        shutil.copyfile(log, _beside(copy, "-wal"))
        with closing(sql.connect(copy)) as connection:
            yield connection


def _with_new_header(data: bytes) -> bytes:
    """A file's bytes with the header of a new database, which makes the schema and the rows behind a damaged header readable."""
    with closing(sql.connect(":memory:")) as connection:
        sql.create(connection)
        new = connection.serialize()
    if len(data) < sql.PAGE_BYTES:  # only the log may be left, which SQLite deletes beside an empty file
        return new
    head = bytearray(new[:HEADER_BYTES])
    head[28:32] = struct.pack(">I", len(data) // sql.PAGE_BYTES)
    head[92:96] = head[24:28]  # else SQLite ignores the number of pages
    return bytes(head) + data[HEADER_BYTES:]


def replace_damaged(path: Path) -> tuple[Path, FileContents]:
    """Rename the file at `path` and leave a new one with its readable rows. The caller holds the file's lock.

    The new file is complete before the old one is renamed: if the disk is full, nothing has changed.

    Returns:
        The damaged file's new path (`NAME.bad-YYYYmmddTHHMMSS`), and the rows that were saved.
    """
    contents = read_contents(path)
    new_file = path.with_name(f"{path.name}.new-{os.getpid()}")
    new_file.unlink(missing_ok=True)  # left by a process with the same id that died here
    try:
        with closing(sql.connect(new_file)) as connection:
            sql.create(connection)
            contents.write(connection)
        bad = _unused_name(path)
        for suffix in _BESIDE:
            with suppress(FileNotFoundError):
                _beside(path, suffix).rename(_beside(bad, suffix))
        path.rename(bad)
        new_file.rename(path)
    finally:
        new_file.unlink(missing_ok=True)
    return bad, contents


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def _unused_name(path: Path) -> Path:
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S")
    candidates = (path.with_name(f"{path.name}.bad-{stamp}" + (f"-{n}" if n else "")) for n in range(1000))
    return next(name for name in candidates if not name.exists())
