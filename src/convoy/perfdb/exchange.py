"""Measurements to and from files: CSV, or JSON lines, one column a field; and from other databases."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from convoy.errors import InputError
from convoy.perfdb.database import Database
from convoy.perfdb.record import COLUMNS, read_record, to_record
from convoy.perfdb.row import Measurement

SUFFIXES: Final = (".csv", ".jsonl")


def export_rows(database: Database, path: Path) -> int:
    """Write every row; the suffix says how. Returns how many; raises InputError for another suffix."""
    _check_suffix(path)
    records = [to_record(row) for row in database.rows()]
    try:
        with path.open("w", newline="", encoding="utf-8") as file:
            if path.suffix == ".csv":
                writer = csv.DictWriter(file, list(COLUMNS), lineterminator="\n")
                writer.writeheader()
                writer.writerows(records)
            else:
                file.writelines(json.dumps(record) + "\n" for record in records)
    except OSError as error:
        raise InputError("path", str(path), "a file that can be written", str(error.strerror)) from error
    return len(records)


def import_rows(database: Database, path: Path) -> int:
    """Take over every row of a file, or none.

    Raises:
        InputError: naming the line and what is wrong with it.
    """
    _check_suffix(path)
    rows: list[Measurement] = []
    try:
        with path.open(newline="", encoding="utf-8") as file:
            records = _csv_records(file) if path.suffix == ".csv" else _json_records(file)
            for number, record in records:
                try:
                    rows.append(read_record(record))
                except InputError as error:
                    expected = f"a measurement in line {number}"
                    raise InputError(str(path), error.argument, expected, f"It says: {error}") from error
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError("path", str(path), "a file of measurements that can be read", str(error)) from error
    return database.put(rows)


def merge_database(database: Database, path: Path) -> int:
    """Take over every whole row of another database; raises InputError where there is none."""
    if not path.is_file():
        raise InputError("path", str(path), "a database file that is there")
    with Database.open_read_only(path) as other:
        return database.put(list(other.rows()))


def _check_suffix(path: Path) -> None:
    if path.suffix not in SUFFIXES:
        raise InputError("path", str(path), "a file name that ends in .csv or .jsonl")


def _csv_records(file: Any) -> Iterator[tuple[int, dict[str, object]]]:
    for number, texts in enumerate(csv.DictReader(file), start=2):
        record: dict[str, object] = {}
        for name, text in texts.items():
            kind = COLUMNS.get(name, str)
            try:
                record[name] = text == "True" if kind is bool else kind(text)
            except (TypeError, ValueError):
                record[name] = text
        yield number, record


def _json_records(file: Any) -> Iterator[tuple[int, dict[str, object]]]:
    for number, line in enumerate(file, start=1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if not isinstance(record, dict):
            raise InputError("line", number, "a JSON object")
        yield number, record
