"""Rows as text: long-form CSV (rows alone) and JSON lines (rows, texts and targets), plain or gzip-compressed, by suffix.

Whatever is read here is checked as if an enemy had written it: types, ranges, lengths, syntax; each refusal has its line.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import IO, Any, Final, Protocol, cast

from convoy.errors import InputError
from convoy.perfdb.record import (
    COLUMNS,
    DEFAULTS,
    ColumnValue,
    read_record,
    read_target,
    read_text,
    target_json,
    to_record,
)
from convoy.perfdb.row import Measurement
from convoy.perfdb.sql import SCHEMA_VERSION
from convoy.untrusted import gunzip, open_file, parse_json

SUFFIXES: Final = (".csv", ".csv.gz", ".jsonl", ".jsonl.gz")

_MAX_LINE: Final = 8 << 20
"""A text of 2^20 characters, six bytes each where JSON escapes them, and room to spare."""
MAX_BYTES: Final = 256 << 20
"""Of an export, before and after decompression: 100 times the rows of a well-known GPU."""
MAX_ROWS: Final = 200_000
"""Of an export: six times the rows of a well-known GPU; they take about 1 KiB of memory each."""
_MAX_TEXTS: Final = 20_000
"""Texts and targets of an export."""
_MAX_TEXT_CHARACTERS: Final = 64 << 20
"""Characters of all texts of an export."""
_MAX_REJECTED: Final = 1000
"""With more bad lines than this, the file is something else."""
_INTEGER: Final = re.compile(r"[0-9]{1,18}")
_NUMBER: Final = re.compile(r"[0-9]{1,40}(\.[0-9]{1,40})?([eE][-+]?[0-9]{1,4})?")


class _CsvReader(Protocol):
    """What `csv.reader` makes."""

    line_num: int

    def __next__(self) -> list[str]: ...

    def __iter__(self) -> Iterator[list[str]]: ...


@dataclass(frozen=True, slots=True)
class RejectedRow:
    """One thing that was not taken in: its line in the file (row of a database; 0: the file as a whole) and why not."""

    line: int
    reason: str


@dataclass(slots=True)
class ImportBatch:
    """What a file offers, checked."""

    rows: list[Measurement] = field(default_factory=list[Measurement])
    texts: dict[str, str] = field(default_factory=dict[str, str])
    targets: dict[str, str] = field(default_factory=dict[str, str])
    refused: list[RejectedRow] = field(default_factory=list[RejectedRow])
    characters: int = 0

    def take(self, line: int, table: object, record: Mapping[str, object]) -> None:
        """Check one record and keep it, or the reason against it.

        Raises:
            InputError: after a thousand refusals, and where there is more than memory should hold.
        """
        try:
            self._take(table, record)
        except InputError as error:
            self.refuse(line, str(error))
        others = max(len(self.texts), len(self.targets))
        if len(self.rows) > MAX_ROWS or others > _MAX_TEXTS or self.characters > _MAX_TEXT_CHARACTERS:
            expected = f"at most {MAX_ROWS} rows and {_MAX_TEXTS} texts of {_MAX_TEXT_CHARACTERS} characters"
            raise InputError("file", f"line {line}", expected, "Export it in parts: --engine, --problem, --target.")

    def refuse(self, line: int, reason: str) -> None:
        """Note why a line was not taken in."""
        self.refused.append(RejectedRow(line, reason))
        if len(self.refused) > _MAX_REJECTED:
            raise InputError("file", f"{len(self.refused)} bad lines", "a Convoy export", f"Line {line}: {reason}")

    def _take(self, table: object, record: Mapping[str, object]) -> None:
        if table == "measurements":
            self.rows.append(read_record(record))
        elif table == "texts":
            key, text = read_text(_word(record, "key"), _word(record, "text"))
            self.texts[key] = text
            self.characters += len(text)
        elif table == "targets":
            content = json.dumps(record.get("json"))
            target = read_target(_word(record, "digest"), content)
            self.targets[target.digest] = target_json(target)
        elif table == "database":
            version = record.get("schema_version")
            if isinstance(version, bool) or not isinstance(version, int) or version > SCHEMA_VERSION:
                raise InputError(
                    "schema_version", version, f"at most {SCHEMA_VERSION}", "Install a newer Convoy to read it."
                )
        else:
            raise InputError("table", table, "one of measurements, texts, targets, database")


def _word(record: Mapping[str, object], name: str) -> str:
    value = record.get(name)
    if not isinstance(value, str):
        raise InputError(name, value, "a text")
    return value


def file_form(path: Path) -> tuple[str, bool]:
    """`csv` or `jsonl`, and whether it is compressed, by the name's suffix; raises InputError for another one."""
    for suffix in SUFFIXES:
        if path.name.lower().endswith(suffix):
            return suffix.removesuffix(".gz")[1:], suffix.endswith(".gz")
    raise InputError("file", path.name, "a name that ends in one of " + ", ".join(SUFFIXES))


def write_rows(rows: Iterable[Measurement], path: Path) -> None:
    """Write rows alone, as CSV with the columns' names on top."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows([_cell(value) for value in to_record(row).values()] for row in rows)
    _write(path, text.getvalue())


def _cell(value: ColumnValue) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value) if isinstance(value, float) else str(value)


def write_all(rows: Iterable[Measurement], texts: Mapping[str, str], targets: Mapping[str, str], path: Path) -> None:
    """Write rows, texts and targets in the form that the suffix names: CSV (rows alone) or JSON lines (everything)."""
    if file_form(path)[0] == "csv":
        write_rows(rows, path)
        return
    lines: list[dict[str, object]] = [{"table": "database", "schema_version": SCHEMA_VERSION}]
    lines.extend({"table": "targets", "digest": digest, "json": json.loads(text)} for digest, text in targets.items())
    lines.extend({"table": "texts", "key": key, "text": text} for key, text in texts.items())
    lines.extend({"table": "measurements", **to_record(row)} for row in rows)
    _write(path, "".join(json.dumps(line) + "\n" for line in lines))


def _write(path: Path, text: str) -> None:
    """Write a file whole or not at all, compressed where the suffix says so; equal text gives equal bytes."""
    data = text.encode()
    if file_form(path)[1]:
        data = gzip.compress(data, mtime=0)
    fresh = path.with_name(f"{path.name}.new-{os.getpid()}")
    try:
        fresh.write_bytes(data)
        fresh.replace(path)
    except OSError as error:
        raise InputError("file", str(path), "a file that can be written", f"It says: {error}.") from None
    finally:
        fresh.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class CsvTable:
    """A CSV file of rows, split into cells and not checked any further.

    Attributes:
        name: the file's.
        header: its columns.
        lines: the number of each line, and its cells: as many as there are columns.
    """

    name: str
    header: list[str]
    lines: list[tuple[int, list[str]]]

    def row(self, index: int) -> Measurement:
        """One of the lines, checked; raises InputError naming it where it is no good row."""
        line, cells = self.lines[index]
        try:
            return read_record(_record(self.header, cells))
        except InputError as error:
            raise InputError(self.name, f"line {line}", "well-formed rows", str(error)) from None


def read_table(file: IO[bytes], name: str) -> CsvTable:
    """Split a CSV file of rows.

    Raises:
        InputError: if it cannot be decoded, or has other columns, or a line with more or fewer values.
    """

    def refuse(line: int, reason: str) -> None:
        raise InputError(name, f"line {line}", "well-formed rows", reason)

    with _text(file, name) as lines:
        reader = csv.reader(lines, strict=True)
        header = _header(reader, name)
        split = list(islice(_split(reader, header, refuse), MAX_ROWS + 1))
    if len(split) > MAX_ROWS:
        raise InputError(name, len(split), f"at most {MAX_ROWS} rows")
    return CsvTable(name, header, split)


def read_file(path: Path) -> ImportBatch:
    """Everything that an export offers.

    Raises:
        InputError: if it is no regular file, is too large, cannot be decoded, or is no export at all.
    """
    form, _ = file_form(path)
    incoming = ImportBatch()
    try:
        with open_file(path, MAX_BYTES, "file") as file, _text(file, path.name) as lines:
            (_read_csv if form == "csv" else _read_json_lines)(lines, path.name, incoming)
    except OSError as error:
        raise InputError("file", str(path), "an export that can be read", f"It says: {error}.") from None
    return incoming


@contextmanager
def _text(file: IO[bytes], name: str) -> Generator[Iterator[str]]:
    """The lines of a file, which may be compressed; raises InputError where it cannot be decoded."""
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


def _read_csv(lines: Iterator[str], name: str, incoming: ImportBatch) -> None:
    reader = csv.reader(lines, strict=True)
    header = _header(reader, name)
    for line, cells in _split(reader, header, incoming.refuse):
        incoming.take(line, "measurements", _record(header, cells))


def _header(reader: _CsvReader, name: str) -> list[str]:
    """The first line, which names the columns."""
    try:
        header = next(reader, list[str]())
    except csv.Error as error:
        raise InputError(name, "line 1", "a first line with the columns' names", f"It says: {error}.") from None
    needed = [column for column in COLUMNS if column not in DEFAULTS]
    if len(set(header)) < len(header) or not set(needed) <= set(header) <= set(COLUMNS):
        raise InputError(name, ",".join(header), "a first line with the columns " + ",".join(COLUMNS))
    return header


def _split(
    reader: _CsvReader, header: Sequence[str], refuse: Callable[[int, str], None]
) -> Iterator[tuple[int, list[str]]]:
    """The number and the cells of every line that has as many as there are columns; empty ones are passed over."""
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


def _record(header: Sequence[str], cells: Sequence[str]) -> dict[str, ColumnValue]:
    return {column: _from_cell(column, cell) for column, cell in zip(header, cells, strict=True)}


def _from_cell(column: str, cell: str) -> ColumnValue:
    """The value of a CSV cell; what does not read as the column's type stays text, which the check then refuses."""
    kind = COLUMNS[column]
    if kind is bool and cell in ("true", "false"):
        return cell == "true"
    if kind is int and _INTEGER.fullmatch(cell):
        return int(cell)
    return float(cell) if kind is float and _NUMBER.fullmatch(cell) else cell


def _read_json_lines(lines: Iterator[str], name: str, incoming: ImportBatch) -> None:
    number = 0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = parse_json(line, "record")
        except InputError as error:
            incoming.refuse(number, str(error))
            continue
        if not isinstance(record, dict):
            incoming.refuse(number, "no JSON object")
            continue
        values = cast("dict[str, Any]", record)
        incoming.take(number, values.pop("table", None), values)
    if not number:
        raise InputError(name, "", "at least one line")
