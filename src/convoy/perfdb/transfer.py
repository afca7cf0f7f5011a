"""Rows as text: CSV (only rows) and JSON lines (rows, texts and targets), plain or gzip-compressed, by suffix.

Everything read here is treated as untrusted: types, ranges, lengths and syntax are checked, and each rejection names its
line.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast

from convoy.errors import InputError
from convoy.perfdb.csv_rows import (
    MAX_BYTES,
    MAX_ROWS,
    cells_record,
    csv_header,
    file_form,
    open_lines,
    split_csv,
)
from convoy.perfdb.record import (
    COLUMNS,
    ColumnValue,
    read_record,
    read_target,
    read_text,
    target_json,
    to_record,
)
from convoy.perfdb.row import Measurement
from convoy.perfdb.sql import SCHEMA_VERSION
from convoy.untrusted import open_file, parse_json
from convoy.whole_file import whole_file

_MAX_TEXTS: Final = 20_000
"""Most texts, and most targets, of an export."""
_MAX_TEXT_CHARACTERS: Final = 64 << 20
"""Most characters of all texts of an export."""
_MAX_REJECTED: Final = 1000
"""With more bad lines than this, the file is not an export."""


@dataclass(frozen=True, slots=True)
class RejectedRow:
    """A rejected row: its line in the file (row of a database; 0: the whole file) and the reason."""

    line: int
    reason: str


@dataclass(slots=True)
class ImportBatch:
    """The checked contents of a file."""

    rows: list[Measurement] = field(default_factory=list[Measurement])
    texts: dict[str, str] = field(default_factory=dict[str, str])
    targets: dict[str, str] = field(default_factory=dict[str, str])
    refused: list[RejectedRow] = field(default_factory=list[RejectedRow])
    characters: int = 0

    def take(self, line: int, table: object, record: Mapping[str, object]) -> None:
        """Check one record and keep it, or the reason why it was rejected.

        Raises:
            InputError: after a thousand rejections, and if there is more than fits in memory.
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
        """Note why a line was rejected."""
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


def write_rows(rows: Iterable[Measurement], path: Path) -> None:
    """Write only rows, as CSV with the columns' names in the first line."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows([_cell(value) for value in to_record(row).values()] for row in rows)
    _write(path, text.getvalue())


def _cell(value: ColumnValue) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value) if isinstance(value, float) else str(value)


def write_all(rows: Iterable[Measurement], texts: Mapping[str, str], targets: Mapping[str, str], path: Path) -> None:
    """Write rows, texts and targets in the format that the suffix names: CSV (only rows) or JSON lines (everything)."""
    if file_form(path)[0] == "csv":
        write_rows(rows, path)
        return
    lines: list[dict[str, object]] = [{"table": "database", "schema_version": SCHEMA_VERSION}]
    lines.extend({"table": "targets", "digest": digest, "json": json.loads(text)} for digest, text in targets.items())
    lines.extend({"table": "texts", "key": key, "text": text} for key, text in texts.items())
    lines.extend({"table": "measurements", **to_record(row)} for row in rows)
    _write(path, "".join(json.dumps(line) + "\n" for line in lines))


def _write(path: Path, text: str) -> None:
    """Write a text completely or not at all, compressed if the suffix says so; equal text gives equal bytes."""
    data = text.encode()
    write_file(path, gzip.compress(data, mtime=0) if file_form(path)[1] else data)


def write_file(path: Path, data: bytes) -> None:
    """Write a file completely or not at all; raises InputError if it cannot be written."""
    try:
        with whole_file(path, "file") as temporary:
            temporary.write_bytes(data)
    except OSError as error:
        raise InputError("file", str(path), "a file that can be written", f"Reason: {error}.") from None


def read_file(path: Path) -> ImportBatch:
    """The checked contents of an export.

    Raises:
        InputError: it is no regular file, is too large, cannot be decoded, or is no export.
    """
    form, _ = file_form(path)
    incoming = ImportBatch()
    try:
        with open_file(path, MAX_BYTES, "file") as file, open_lines(file, path.name) as lines:
            (_read_csv if form == "csv" else _read_json_lines)(lines, path.name, incoming)
    except OSError as error:
        raise InputError("file", str(path), "an export that can be read", f"Reason: {error}.") from None
    return incoming


def _read_csv(lines: Iterator[str], name: str, incoming: ImportBatch) -> None:
    reader = csv.reader(lines, strict=True)
    header = csv_header(reader, name)
    for line, cells in split_csv(reader, header, incoming.refuse):
        incoming.take(line, "measurements", cells_record(header, cells))


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
