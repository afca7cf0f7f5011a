"""The text of exports: lines of plain or compressed files, and rows of CSV files, split into cells."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final, Protocol, cast

from convoy.errors import InputError
from convoy.perfdb.record import COLUMNS, DEFAULTS, ColumnValue
from convoy.untrusted import gunzip

SUFFIXES: Final = (".csv", ".csv.gz", ".jsonl", ".jsonl.gz")

_MAX_LINE: Final = 8 << 20
"""A text of 2^20 characters, six bytes each if JSON escapes them, and some more."""
MAX_BYTES: Final = 256 << 20
"""Most bytes of an export, before and after decompression: 100 times the rows of a common GPU."""
MAX_ROWS: Final = 200_000
"""Most rows of an export: six times the rows of a common GPU; each takes about 1 KiB of memory."""
_INTEGER: Final = re.compile(r"[0-9]{1,18}")
_NUMBER: Final = re.compile(r"[0-9]{1,40}(\.[0-9]{1,40})?([eE][-+]?[0-9]{1,4})?")


class _CsvReader(Protocol):
    """The interface of the object that `csv.reader` returns."""

    line_num: int

    def __next__(self) -> list[str]: ...

    def __iter__(self) -> Iterator[list[str]]: ...


def file_form(path: Path) -> tuple[str, bool]:
    """`csv` or `jsonl`, and whether it is compressed, by the name's suffix; raises InputError for another one."""
    for suffix in SUFFIXES:
        if path.name.lower().endswith(suffix):
            return suffix.removesuffix(".gz")[1:], suffix.endswith(".gz")
    raise InputError("file", path.name, "a name that ends in one of " + ", ".join(SUFFIXES))


CsvLine = tuple[int, list[str]]
"""A line's number, and its cells."""


@contextmanager
def open_lines(file: IO[bytes], name: str) -> Generator[Iterator[str]]:
    """The lines of a file, which may be compressed; raises InputError if it cannot be decoded."""
    raw = gunzip(file, MAX_BYTES, name) if file_form(Path(name))[1] else file
    try:
        yield _lines(io.TextIOWrapper(cast("IO[bytes]", raw), encoding="utf-8-sig", newline=""), name)
    except UnicodeDecodeError as error:
        raise InputError(name, f"bytes at {error.start}", "text in UTF-8") from None


def _lines(text: io.TextIOWrapper, name: str) -> Iterator[str]:
    while line := text.readline(_MAX_LINE):
        if len(line) >= _MAX_LINE:
            raise InputError(name, line[:80], f"lines of less than {_MAX_LINE} characters")
        yield line


def csv_header(reader: _CsvReader, name: str) -> list[str]:
    """The first line, which names the columns."""
    try:
        header = next(reader, list[str]())
    except csv.Error as error:
        raise InputError(name, "line 1", "a first line with the columns' names", f"Reason: {error}.") from None
    needed = [column for column in COLUMNS if column not in DEFAULTS]
    if len(set(header)) < len(header) or not set(needed) <= set(header) <= set(COLUMNS):
        raise InputError(name, ",".join(header), "a first line with the columns " + ",".join(COLUMNS))
    return header


def split_csv(reader: _CsvReader, header: Sequence[str], refuse: Callable[[int, str], None]) -> Iterator[CsvLine]:
    """The number and the cells of every line that has as many cells as there are columns; empty lines are skipped."""
    while True:
        line = reader.line_num + 1
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            refuse(line, str(error))
            continue
        if len(cells) == len(header):
            yield line, cells
        elif cells:
            refuse(line, f"got {len(cells)} values, expected {len(header)}")


def cells_record(header: Sequence[str], cells: Sequence[str]) -> dict[str, ColumnValue]:
    """A line's values by column name; not checked."""
    return {column: _from_cell(column, cell) for column, cell in zip(header, cells, strict=True)}


def _from_cell(column: str, cell: str) -> ColumnValue:
    """The value of a CSV cell; a cell that is not of the column's type stays text, which the later check rejects."""
    kind = COLUMNS[column]
    if kind is bool and cell in ("true", "false"):
        return cell == "true"
    if kind is int and _INTEGER.fullmatch(cell):
        return int(cell)
    return float(cell) if kind is float and _NUMBER.fullmatch(cell) else cell
