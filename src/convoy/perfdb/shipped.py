"""Results that ship with the package, read-only: one gzip-compressed CSV per target, read when that target is used."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Final

from convoy.errors import InputError
from convoy.perfdb.csv_rows import CsvLine, CsvTable, read_table
from convoy.perfdb.record import MAX_TARGET, check_digest, read_target, target_json
from convoy.perfdb.row import Measurement
from convoy.perfdb.transfer import write_rows
from convoy.target import Target

SUFFIX: Final = ".csv.gz"
TARGET_SUFFIX: Final = ".target.json"
"""Suffix of a target's description, beside its rows, if it is known."""


def shipped_folder() -> Traversable:
    """The folder inside the package."""
    return files("convoy.perfdb").joinpath("shipped")


def shipped_targets(folder: Traversable | None = None) -> list[str]:
    """Digests of the targets with shipped results."""
    folder = folder or shipped_folder()
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    return sorted(name.removesuffix(SUFFIX) for name in names if name.endswith(SUFFIX))


class ShippedTable:
    """The rows that ship for one target, checked problem by problem when they are used.

    A net uses some hundred of tens of thousands; checking all of them took two thirds of a start from the database. All databases
    of a process share a table (`open_shipped`), so nothing that it returns can be changed in it.
    """

    def __init__(self, table: CsvTable, target: str) -> None:
        self._table = replace(table, lines=[])
        self._unread: dict[tuple[str, str], list[CsvLine]] = {}
        at = {name: table.header.index(name) for name in ("problem", "protocol", "target")}
        for line in table.lines:
            cells = line[1]
            if cells[at["target"]] != target:
                raise InputError(table.name, cells[at["target"]], f"rows of the target {target} alone")
            self._unread.setdefault((cells[at["problem"]], cells[at["protocol"]]), []).append(line)
        self._keys = tuple(self._unread)
        self._read: dict[tuple[str, str], tuple[Measurement, ...]] = {}

    def lookup(self, problem: str, protocol: str) -> tuple[Measurement, ...]:
        """The rows of a problem by a protocol; raises InputError if one is malformed."""
        key = (problem, protocol)
        found = self._read.get(key)
        if found is None:
            lines = self._unread.get(key)
            if lines is None:  # there are none, or another thread has read them just now
                return self._read.get(key, ())
            found = self._read[key] = tuple(self._table.checked(line) for line in lines)
            self._unread.pop(key, None)
        return found

    def rows(self, protocol: str = "", wanted: Callable[[str], bool] | None = None) -> list[Measurement]:
        """The rows of all or of the wanted problems, of one protocol or of all; raises InputError if one is malformed."""
        keys = [key for key in self._keys if protocol in ("", key[1]) and (wanted is None or wanted(key[0]))]
        return [row for key in keys for row in self.lookup(*key)]


def open_shipped(target: str, folder: Traversable | None = None) -> ShippedTable | None:
    """The rows that ship for a target, from one table for the whole process while the file stays the same.

    Returns:
        None if there is no file for the target.

    Raises:
        InputError: the file is damaged, or holds a row of another target. It is then not used at all.
    """
    entry = (folder or shipped_folder()).joinpath(check_digest(target) + SUFFIX)
    if not entry.is_file():
        return None
    if not isinstance(entry, Path):  # of a package in an archive
        return _read(entry, target)
    found = entry.stat()
    return _read_once(entry.absolute(), target, (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns))


@lru_cache(maxsize=8)
def _read_once(path: Path, target: str, identity: tuple[int, ...]) -> ShippedTable:
    del identity  # another file has another one, and a table of its own
    return _read(path, target)


def _read(entry: Traversable, target: str) -> ShippedTable:
    with entry.open("rb") as file:
        return ShippedTable(read_table(file, entry.name), target)


class ShippedTables:
    """The shipped tables of a session, each opened when it is first used; sessions of a process share them.

    Args:
        warnings: gets one line for a damaged file, which is then not used any more.
    """

    def __init__(self, warnings: list[str]) -> None:
        self._warnings = warnings
        self._opened: dict[str, ShippedTable | None] = {}

    def query(self, target: str, question: Callable[[ShippedTable], Sequence[Measurement]]) -> Sequence[Measurement]:
        """The answer of a target's table; empty if there is none, or if its file is damaged."""
        try:
            if target not in self._opened:
                self._opened[target] = open_shipped(target)
            table = self._opened[target]
            return () if table is None else question(table)
        except InputError as error:
            self._warnings.append(f"shipped results of the target {target} are not used: {error}")
            self._opened[target] = None
            return ()


def read_shipped(target: str, folder: Traversable | None = None) -> list[Measurement]:
    """All rows that ship for a target; none if there is no file for it.

    Raises:
        InputError: the file is damaged, or holds a row that is malformed or of another target.
    """
    table = open_shipped(target, folder)
    return table.rows() if table else []


def shipped_descriptions(folder: Traversable | None = None) -> dict[str, Target]:
    """The described targets with shipped results, by digest; a damaged description is left out."""
    folder = folder or shipped_folder()
    found: dict[str, Target] = {}
    for digest in shipped_targets(folder):
        entry = folder.joinpath(digest + TARGET_SUFFIX)
        with suppress(InputError, UnicodeDecodeError):
            if entry.is_file():
                with entry.open("rb") as file:
                    found[digest] = read_target(digest, file.read(MAX_TARGET + 2).decode("utf-8").strip())
    return found


def write_shipped(
    rows: Iterable[Measurement], folder: Path, descriptions: Mapping[str, Target] | None = None
) -> list[Path]:
    """Write rows in the shipped form into `folder`, one file per target; equal rows give equal bytes.

    Args:
        rows: rows of any targets.
        folder: created if it does not exist.
        descriptions: targets by digest, written beside their rows.

    Returns:
        The row files that were written.
    """
    by_target: dict[str, list[Measurement]] = {}
    for row in rows:
        by_target.setdefault(check_digest(row.target), []).append(row)
    folder.mkdir(parents=True, exist_ok=True)
    paths: list[Path] = []
    for target, own in sorted(by_target.items()):
        own.sort(
            key=lambda row: (row.problem, row.protocol, row.config.engine, row.config.version, str(row.config.knobs))
        )
        paths.append(folder / (target + SUFFIX))
        write_rows(own, paths[-1])
        if descriptions and target in descriptions:
            text = target_json(descriptions[target]) + "\n"
            (folder / (target + TARGET_SUFFIX)).write_text(text, encoding="utf-8")
    return paths
