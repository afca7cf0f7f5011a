"""The form of shipped rows: a gzip file with one line of JSON, which holds the texts, and binary columns behind it.

Byte by byte: the line is an object with `form` (1), `target` (its digest), `rows` (their number) and `texts` (by column name,
the different texts of the column), and ends with a line feed. Then follow the columns of `ROW_COLUMNS`, an entry for each row,
and those of `PROBLEM_COLUMNS`, an entry for each problem; `size` has three. All numbers are little-endian. An entry of a column
with texts is the place of its text. A config's text is `engine@version[knobs]`. The columns of problems repeat what a problem's
key says (`convoy.problem.layer_coordinates`), because parsing ten thousand keys takes most of a second.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from convoy.errors import InputError
from convoy.perfdb.csv_rows import MAX_BYTES, MAX_ROWS
from convoy.perfdb.record import to_record
from convoy.perfdb.row import Measurement
from convoy.perfdb.time_columns import Numbers, ProblemColumns, TextColumn
from convoy.problem.layer_coordinates import SIZES
from convoy.untrusted import gunzip, parse_json

FORM: Final = 1

ROW_COLUMNS: Final = {
    "problem": "<u4", "config": "<u4", "protocol": "<u4", "status": "<u4", "samples": "<u4", "median_us": "<f8",
    "spread_us": "<f8", "error": "<f8", "workspace_bytes": "<u8", "resident_bytes": "<u8", "deterministic": "<u1",
    "reason": "<u4", "versions": "<u4", "date": "<u4",
}  # fmt: skip
"""Columns with an entry for each row, in their order in the file."""

PROBLEM_COLUMNS: Final = {
    "described": "<u1", "kind": "<u4", "size": "<f8", "filters": "<u4", "arithmetic": "<u4", "epilogue": "<u4",
    "pooled": "<u1", "flops": "<f8", "bytes_min": "<f8",
}  # fmt: skip
"""Columns with an entry for each problem, likewise: `ProblemColumns`."""

TEXTS: Final = (
    "problem", "config", "protocol", "status", "reason", "versions", "date", "kind", "filters", "arithmetic", "epilogue",
)  # fmt: skip
"""The columns whose entries are places of texts."""

_FLAGS: Final = ("deterministic", "described", "pooled")
_MOST_VALUES: Final = 100 * MAX_ROWS
"""Most brackets, commas and colons in the texts: a problem's key has about twenty."""


@dataclass(frozen=True, eq=False, slots=True)
class RowColumns:
    """The rows of one target as columns.

    Attributes:
        numbers: by name, the columns of `ROW_COLUMNS` that have no texts.
        texts: those that have.
        problems: the problems and their facts.
    """

    numbers: Mapping[str, NDArray[Any]]
    texts: Mapping[str, TextColumn]
    problems: ProblemColumns

    def __len__(self) -> int:
        return len(self.texts["problem"].index)

    @staticmethod
    def of(rows: Sequence[Measurement]) -> RowColumns:
        """The columns of rows."""
        records = [{**to_record(row), "config": str(row.config)} for row in rows]
        texts = {name: TextColumn.of([str(each[name]) for each in records]) for name in ROW_COLUMNS if name in TEXTS}
        numbers = {
            name: np.array([each[name] for each in records], dtype=kind)
            for name, kind in ROW_COLUMNS.items()
            if name not in TEXTS
        }
        return RowColumns(numbers, texts, ProblemColumns.of(texts["problem"].texts))


def encode_rows(rows: Sequence[Measurement], target: str) -> bytes:
    """The file's bytes; equal rows in equal order give equal bytes."""
    columns = RowColumns.of(rows)
    entries: dict[str, Any] = {**columns.numbers, **columns.texts, **_problem_columns(columns.problems)}
    texts = {name: list(entries[name].texts) for name in TEXTS}
    line = json.dumps({"form": FORM, "target": target, "rows": len(rows), "texts": texts}, separators=(",", ":"))
    parts = [line.encode() + b"\n"]
    for name, kind in (*ROW_COLUMNS.items(), *PROBLEM_COLUMNS.items()):
        values = entries[name].index if name in TEXTS else entries[name]
        parts.append(np.ascontiguousarray(values).astype(kind).tobytes())
    return gzip.compress(b"".join(parts), mtime=0)


def _problem_columns(problems: ProblemColumns) -> dict[str, Any]:
    return {
        "described": problems.described, "kind": problems.kinds, "size": problems.sizes, "filters": problems.filters,
        "arithmetic": problems.arithmetic, "epilogue": problems.epilogues, "pooled": problems.pooled,
        "flops": problems.flops, "bytes_min": problems.bytes_min,
    }  # fmt: skip


def decode_rows(file: IO[bytes], name: str, target: str) -> RowColumns:
    """The columns of a file; each row is checked when it is read (`convoy.perfdb.shipped`).

    gzip's checksum finds what changed since the file was written.

    Raises:
        InputError: naming the file: it is damaged, of another target, or of another form.
    """
    data = gunzip(file, MAX_BYTES, name).read()
    end = data.find(b"\n")
    if end < 0:
        raise InputError(name, data[:40], "a first line with the columns' texts")
    count, texts = _read_line(data[:end], name, target)
    problems = len(texts["problem"])
    found: dict[str, Any] = {}
    place = end + 1
    for column, kind in (*ROW_COLUMNS.items(), *PROBLEM_COLUMNS.items()):
        entries = count if column in ROW_COLUMNS else problems * (SIZES if column == "size" else 1)
        size = entries * np.dtype(kind).itemsize
        if place + size > len(data):
            raise InputError(name, f"{len(data)} bytes", f"columns of {count} rows and {problems} problems")
        found[column] = _checked(np.frombuffer(data, kind, entries, place), column, texts, name)
        place += size
    if place != len(data):
        raise InputError(name, f"{len(data)} bytes", f"{place} bytes, for {count} rows and {problems} problems")
    return RowColumns(
        {column: found[column] for column in ROW_COLUMNS if column not in TEXTS},
        {column: found[column] for column in ROW_COLUMNS if column in TEXTS},
        ProblemColumns(
            texts["problem"], found["described"], found["kind"], found["size"].reshape(-1, SIZES), found["filters"],
            found["arithmetic"], found["epilogue"], found["pooled"], found["flops"], found["bytes_min"],
        ),
    )  # fmt: skip


def _read_line(line: bytes, name: str, target: str) -> tuple[int, dict[str, list[str]]]:
    """The number of rows, and the texts of each column."""
    said = parse_json(line, name, most_values=_MOST_VALUES)
    fields = cast("dict[str, Any]", said if isinstance(said, dict) else {})
    if fields.get("form") != FORM or not isinstance(fields.get("texts"), dict):
        raise InputError(name, str(fields.get("form")), f"shipped rows of form {FORM}")
    if fields.get("target") != target:
        raise InputError(name, str(fields.get("target")), f"rows of the target {target} alone")
    count = fields.get("rows")
    if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= MAX_ROWS:
        raise InputError(f"{name}: rows", str(count), f"a number of at most {MAX_ROWS}")
    texts = cast("dict[str, Any]", fields["texts"])
    for column in TEXTS:
        own = texts.get(column)
        if not isinstance(own, list) or not all(isinstance(text, str) for text in cast("list[object]", own)):
            raise InputError(f"{name}: texts", column, "a list of texts for each of " + ", ".join(TEXTS))
        if len(set(cast("list[str]", own))) < len(cast("list[str]", own)) or len(cast("list[str]", own)) > MAX_ROWS:
            raise InputError(f"{name}: texts", column, f"at most {MAX_ROWS} texts, each once")
    return count, texts


def _checked(values: NDArray[Any], column: str, texts: Mapping[str, Sequence[str]], name: str) -> Any:
    """A column, with its texts if it has any; raises InputError for a place without a text and for a number out of range."""
    if column in TEXTS:
        if len(values) and int(values.max()) >= len(texts[column]):
            raise InputError(f"{name}: {column}", int(values.max()), f"the place of one of {len(texts[column])} texts")
        return TextColumn(texts[column], values.astype(np.int64))
    if column in _FLAGS:
        if len(values) and int(values.max()) > 1:
            raise InputError(f"{name}: {column}", int(values.max()), "0 or 1")
        return values.astype(np.bool_)
    numbers: Numbers = values.astype(np.float64)
    if not bool(np.isfinite(numbers).all()) or bool((numbers < 0).any()):
        raise InputError(f"{name}: {column}", "a number out of range", "finite numbers of at least 0")
    return values
