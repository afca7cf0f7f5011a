"""Results that come with the package, one gzip-compressed CSV a target, read when that target is asked for; never written to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Final

from convoy.errors import InputError
from convoy.perfdb.record import MAX_TARGET, check_digest, read_target, target_json
from convoy.perfdb.row import Measurement
from convoy.perfdb.transfer import CsvTable, read_table, write_rows
from convoy.target import Target

SUFFIX: Final = ".csv.gz"
TARGET_SUFFIX: Final = ".target.json"
"""Beside the rows of a target, where its description was known: its fields."""


def shipped_folder() -> Traversable:
    """The folder inside the package."""
    return files("convoy.perfdb").joinpath("shipped")


def shipped_targets(folder: Traversable | None = None) -> list[str]:
    """Digests of the targets that results are shipped for."""
    folder = folder or shipped_folder()
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    return sorted(name.removesuffix(SUFFIX) for name in names if name.endswith(SUFFIX))


class ShippedTable:
    """The rows that ship for one target, checked problem by problem as they are asked for.

    A net asks for some hundred of tens of thousands: to check them all took two thirds of a start from the database.
    """

    def __init__(self, table: CsvTable, target: str) -> None:
        self._table = table
        self._index: dict[tuple[str, str], list[int]] = {}
        at = {name: table.header.index(name) for name in ("problem", "protocol", "target")}
        for number, (_, cells) in enumerate(table.lines):
            if cells[at["target"]] != target:
                raise InputError(table.name, cells[at["target"]], f"rows of the target {target} alone")
            self._index.setdefault((cells[at["problem"]], cells[at["protocol"]]), []).append(number)
        self._read: dict[tuple[str, str], list[Measurement]] = {}

    def lookup(self, problem: str, protocol: str) -> list[Measurement]:
        """The rows of a problem by a protocol; raises InputError where one is malformed."""
        key = (problem, protocol)
        if key not in self._read:
            self._read[key] = [self._table.row(number) for number in self._index.get(key, ())]
        return self._read[key]

    def rows(self, protocol: str = "", wanted: Callable[[str], bool] | None = None) -> list[Measurement]:
        """The rows of all problems or of the wanted, of one protocol or of all; raises InputError where one is malformed."""
        keys = [key for key in self._index if protocol in ("", key[1]) and (wanted is None or wanted(key[0]))]
        return [row for key in keys for row in self.lookup(*key)]


def open_shipped(target: str, folder: Traversable | None = None) -> ShippedTable | None:
    """The rows shipped for a target; None where there is no file for it.

    Raises:
        InputError: if the file is damaged, or holds a row of another target. It is then not used at all.
    """
    entry = (folder or shipped_folder()).joinpath(check_digest(target) + SUFFIX)
    if not entry.is_file():
        return None
    with entry.open("rb") as file:
        return ShippedTable(read_table(file, entry.name), target)


class ShippedTables:
    """The shelves of a session, each opened when it is first asked.

    Args:
        warnings: a damaged file is one line more here, and not used any more.
    """

    def __init__(self, warnings: list[str]) -> None:
        self._warnings = warnings
        self._opened: dict[str, ShippedTable | None] = {}

    def ask(self, target: str, question: Callable[[ShippedTable], list[Measurement]]) -> list[Measurement]:
        """What the shelf of a target answers; nothing where there is none, or where its file is damaged."""
        try:
            if target not in self._opened:
                self._opened[target] = open_shipped(target)
            shelf = self._opened[target]
            return [] if shelf is None else question(shelf)
        except InputError as error:
            self._warnings.append(f"shipped results of the target {target} are not used: {error}")
            self._opened[target] = None
            return []


def read_shipped(target: str, folder: Traversable | None = None) -> list[Measurement]:
    """All rows shipped for a target; none where there is no file for it.

    Raises:
        InputError: if the file is damaged, or holds a row that is malformed or of another target.
    """
    shelf = open_shipped(target, folder)
    return shelf.rows() if shelf else []


def shipped_descriptions(folder: Traversable | None = None) -> dict[str, Target]:
    """The targets that results are shipped for and that are described, by digest; a damaged description is left out."""
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
    """Write rows in the shipped form into `folder`, one file a target; equal rows give equal bytes.

    Args:
        rows: rows of any targets.
        folder: made where it is not there.
        descriptions: targets by digest, written beside their rows.

    Returns:
        The files of rows written.
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
