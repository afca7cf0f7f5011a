"""A measurement as a flat record: one value per column, with the same names in SQLite, CSV and JSON; checked and bounded.

The columns are the fields of `Measurement`, with `config` split into `engine`, `version` and `knobs`. Everything that comes
from outside (a database file, an import, shipped results) passes `read_record`, `read_text` or `read_target`.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Mapping
from dataclasses import MISSING, fields
from datetime import datetime
from functools import lru_cache
from typing import Any, Final

from convoy.errors import InputError
from convoy.perfdb.row import Measurement, Status
from convoy.problem import ANY_LAYOUT, LAYOUTS, VOLUME_LAYOUTS, EngineConfig, Knobs, parse_problem
from convoy.target import Target
from convoy.untrusted import parse_json

ColumnValue = str | int | float | bool

_COLUMN_TYPES: Final = {"str": str, "int": int, "float": float, "bool": bool, "Status": str}
_CONFIG: Final = {"engine": str, "version": int, "knobs": str}


def _columns() -> dict[str, type]:
    columns: dict[str, type] = {}
    for field in fields(Measurement):
        columns |= _CONFIG if field.name == "config" else {field.name: _COLUMN_TYPES[str(field.type)]}
    return columns


COLUMNS: Final[dict[str, type]] = _columns()
"""Column name → Python type (`str`, `int`, `float` or `bool`), in the order of `Measurement`'s fields."""

KEY_COLUMNS: Final = ("problem", "target", "protocol", "engine", "version", "knobs")
"""The columns that identify a row; their order serves the most common query (one problem, one target, one protocol)."""

DEFAULTS: Final[dict[str, ColumnValue]] = {f.name: f.default for f in fields(Measurement) if f.default is not MISSING}
"""Values of the columns that a record may leave out."""

MAX_CHARACTERS: Final = {
    "problem": 400,
    "engine": 100,
    "knobs": 500,
    "target": 16,
    "protocol": 200,
    "reason": 4000,
    "versions": 1000,
    "date": 40,
}
"""Most characters of each text column: far more than is ever written, far less than could fill a disk."""

MAX_TEXT: Final = 1 << 20
"""Most characters of a subgraph's text."""

MAX_TARGET: Final = 1 << 16
"""Most characters of a target's JSON."""

_MAX_INTEGER: Final = {"version": 10**6, "samples": 10**9, "workspace_bytes": 2**53, "resident_bytes": 2**53}
_MAX_TIME_US: Final = 1e12
"""About eleven days: a longer median comes from a broken clock."""

_STATUSES: Final = frozenset(str(member) for member in Status)
_ENCODER: Final = json.JSONEncoder(sort_keys=True, separators=(",", ":"))
_SUBGRAPH: Final = re.compile(f"subgraph:({'|'.join((*LAYOUTS, *VOLUME_LAYOUTS, ANY_LAYOUT))}):[0-9a-f]{{24}}")
_ENGINE: Final = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*")
_PROTOCOL: Final = re.compile(r"[!-~]+")
_DIGEST: Final = re.compile(r"[0-9a-f]{16}")


def to_record(row: Measurement) -> dict[str, ColumnValue]:
    """A measurement as one value per column, in `COLUMNS` order."""
    config = {"engine": row.config.engine, "version": row.config.version, "knobs": str(row.config.knobs)}
    return {name: config[name] if name in config else _plain(getattr(row, name)) for name in COLUMNS}


def _plain(value: Any) -> ColumnValue:
    return str(value) if isinstance(value, Status) else value


def read_record(record: Mapping[str, object]) -> Measurement:
    """Check a record and make a measurement of it.

    Args:
        record: values by column name, of the columns' types; columns with a default may be missing.

    Raises:
        InputError: naming the column, for an unknown or missing column, a wrong type, a value out of range, a text that is
            too long, and a malformed problem, engine, knobs, target or protocol.
    """
    for name in record:
        if name not in COLUMNS:
            raise InputError("column", name, "one of " + ", ".join(COLUMNS))
    return checked_row({name: _checked(name, record.get(name, DEFAULTS.get(name))) for name in COLUMNS})


def _checked(name: str, value: object) -> Any:
    return checked_text(name, value) if type(value) is str else checked_value(name, value)


def checked_text(name: str, text: str) -> Any:
    """`checked_value` of a text; looked up where it was checked before, because texts occur again in row after row."""
    return _known_text(name, text) if len(text) <= MAX_CHARACTERS["problem"] else checked_value(name, text)


def checked_row(values: dict[str, Any]) -> Measurement:
    """Make a measurement of values that have their columns' types (`checked_value`); the dict is emptied in part.

    What a text must be is looked up where the same text was checked before: tens of thousands of shipped rows have some hundred
    different engines, knobs and dates.

    Raises:
        InputError: naming the column.
    """
    _check_key(values)
    _check_figures(values)
    if values["date"]:
        _check_date(str(values["date"]))
    config = _config(values.pop("engine"), values.pop("version"), values.pop("knobs"))
    values["status"] = Status(values["status"])
    return Measurement(config=config, **values)


def checked_value(name: str, value: object) -> Any:
    """A column's value; raises InputError naming the column if it has another type or is out of range."""
    kind = COLUMNS[name]
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value) if abs(value) < 2**63 else math.inf
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise InputError(name, value, f"a value of type {kind.__name__}")
    if isinstance(value, str):
        _check_text(name, value, MAX_CHARACTERS.get(name, 20))
    elif isinstance(value, float) and not 0 <= value < math.inf:
        raise InputError(name, value, "a finite number of at least 0")
    elif isinstance(value, int) and not 0 <= value <= _MAX_INTEGER.get(name, 1):
        raise InputError(name, value, f"an integer from 0 to {_MAX_INTEGER.get(name, 1)}")
    return value


_known_text = lru_cache(maxsize=1 << 14)(checked_value)


def _check_text(name: str, value: str, longest: int) -> None:
    if len(value) > longest:
        raise InputError(name, value, f"at most {longest} characters")
    if not value.isascii() and any("\ud800" <= ch <= "\udfff" for ch in value):
        raise InputError(name, value, "text that UTF-8 can encode")


@lru_cache(maxsize=1 << 10)
def _is_canonical(problem: str) -> bool:
    """Whether a problem's key is in its canonical form; cached, because a problem's rows follow one another."""
    return bool(_SUBGRAPH.fullmatch(problem)) or parse_problem(problem).key == problem


@lru_cache(maxsize=1 << 14)
def _config(engine: str, version: int, knobs: str) -> EngineConfig:
    return EngineConfig(engine, version, _knobs(knobs))


@lru_cache(maxsize=1 << 14)
def _has_canonical_knobs(text: str) -> bool:
    return str(_knobs(text)) == text


@lru_cache(maxsize=1 << 8)
def _is_engine(text: str) -> bool:
    return _ENGINE.fullmatch(text) is not None


@lru_cache(maxsize=1 << 14)
def _knobs(text: str) -> Knobs:
    """Parsed knobs; cached, because the same knobs occur in many rows."""
    return Knobs.parse(text)


def _check_key(values: Mapping[str, Any]) -> None:
    problem, engine, knobs = values["problem"], values["engine"], values["knobs"]
    if not _is_canonical(problem):
        raise InputError("problem", problem, "the canonical key, as a problem's `key` gives it")
    if not _is_engine(engine):
        raise InputError("engine", engine, "an engine id such as triton.implicit_gemm")
    if not _has_canonical_knobs(knobs):
        raise InputError("knobs", knobs, "name=value pairs, sorted by name, separated by commas")
    if not _PROTOCOL.fullmatch(values["protocol"]):
        raise InputError("protocol", values["protocol"], "a protocol's id: visible ASCII characters without blanks")
    check_digest(values["target"])


def check_digest(digest: str) -> str:
    """Return a target's digest unchanged; raises InputError unless it is sixteen hex digits."""
    if not _DIGEST.fullmatch(digest):
        raise InputError("target", digest, "a target's digest: sixteen hex digits")
    return digest


def _check_figures(values: Mapping[str, Any]) -> None:
    status = values["status"]
    if status not in _STATUSES:
        raise InputError("status", status, "one of " + ", ".join(Status))
    if status == Status.OK:
        for name in ("median_us", "spread_us"):
            if values[name] > _MAX_TIME_US or (name == "median_us" and not values[name]):
                raise InputError(name, values[name], f"a time of at most {_MAX_TIME_US:g} us, a median above 0")
        return
    for name in ("samples", "median_us", "spread_us"):
        if values[name]:
            raise InputError(name, values[name], f"0, because the status is {status}")
    if not values["reason"]:
        raise InputError("reason", "", f"the cause, because the status is {status}")


@lru_cache(maxsize=1 << 10)
def _check_date(date: str) -> None:
    try:
        datetime.fromisoformat(date)
    except ValueError:
        raise InputError("date", date, "an ISO 8601 date, or nothing") from None


def clip_reason(reason: str) -> str:
    """Make a reason storable: characters that UTF-8 cannot encode are replaced, and a long text (a compiler's log) is cut."""
    clean = reason.encode("utf-8", "replace").decode()
    longest = MAX_CHARACTERS["reason"]
    return clean if len(clean) <= longest else clean[: longest - 1] + "…"


def read_text(key: str, text: str) -> tuple[str, str]:
    """Check a subgraph's text against its key, which holds the text's hash; raises InputError if they differ."""
    _check_text("text", text, MAX_TEXT)
    if not _SUBGRAPH.fullmatch(key) or not text:
        raise InputError("key", key, "a subgraph problem's key, with its text")
    try:
        parse_problem(key, text)
    except InputError:
        raise InputError("text", text, f"the text that {key} was made from") from None
    return key, text


def target_json(target: Target) -> str:
    """A target as one line of JSON, the same for equal targets."""
    return json.dumps(target.to_dict(), sort_keys=True)


def read_target(digest: str, text: str) -> Target:
    """Check a target's JSON against its digest; raises InputError if it is malformed or has another digest."""
    _check_text("target", text, MAX_TARGET)
    try:
        target = Target.from_dict(parse_json(text, "target"))
    except InputError as error:
        raise InputError("target", text, "a target's fields as JSON", f"Reading it failed: {error}") from None
    if target.digest != digest:
        raise InputError("target", digest, f"the digest of its fields, {target.digest}")
    return target


def seal_row(record: Mapping[str, Any]) -> int:
    """CRC-32 of a record's values. Columns with their default value are left out, so columns added later keep old seals valid."""
    said = {name: COLUMNS[name](value) for name, value in record.items()}
    return _crc(["measurements", {name: value for name, value in said.items() if value != DEFAULTS.get(name)}])


def seal_pair(table: str, key: str, text: str) -> int:
    """CRC-32 of a row of the tables `texts`, `targets` and `plans`."""
    return _crc([table, key, text])


def _crc(content: object) -> int:
    return zlib.crc32(_ENCODER.encode(content).encode())
