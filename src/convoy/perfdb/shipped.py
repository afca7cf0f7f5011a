"""Results that ship with the package, read-only: one file per target (`shipped_form`), read when that target is used."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import lru_cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from convoy.errors import InputError
from convoy.perfdb.record import MAX_TARGET, check_digest, read_target, target_json
from convoy.perfdb.row import Measurement
from convoy.perfdb.transfer import write_file
from convoy.target import Target

if TYPE_CHECKING:
    from convoy.perfdb.shipped_table import ShippedTable

SUFFIX: Final = ".rows.gz"
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
    from convoy.perfdb.shipped_table import read_table  # numpy takes 0.1 s to import

    with entry.open("rb") as file:
        return read_table(file, entry.name, target)


Answer = TypeVar("Answer")


class ShippedTables:
    """The shipped tables of a session, each opened when it is first used; sessions of a process share them.

    Args:
        warnings: gets one line for a damaged file, which is then not used any more.
    """

    def __init__(self, warnings: list[str]) -> None:
        self._warnings = warnings
        self._opened: dict[str, ShippedTable | None] = {}
        self._cpus: frozenset[str] | None = None

    def is_of_cpu(self, target: str) -> bool:
        """Whether rows ship for a target and it is a CPU."""
        if self._cpus is None:
            self._cpus = frozenset(digest for digest, found in shipped_descriptions().items() if found.device == "cpu")
        return target in self._cpus

    def query(self, target: str, question: Callable[[ShippedTable], Answer], otherwise: Answer) -> Answer:
        """The answer of a target's table; `otherwise` if there is none, or if its file is damaged."""
        try:
            if target not in self._opened:
                self._opened[target] = open_shipped(target)
            table = self._opened[target]
            return otherwise if table is None else question(table)
        except InputError as error:
            self._warnings.append(f"shipped results of the target {target} are not used: {error}")
            self._opened[target] = None
            return otherwise


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
    from convoy.perfdb.shipped_form import encode_rows

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
        write_file(paths[-1], encode_rows(own, target))
        if descriptions and target in descriptions:
            text = target_json(descriptions[target]) + "\n"
            (folder / (target + TARGET_SUFFIX)).write_text(text, encoding="utf-8")
    return paths
