"""Rows as they are stored: the order of their values, and the check that they are what was written."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Final

from convoy.errors import InputError
from convoy.perfdb.faults import DamagedFileError
from convoy.perfdb.record import COLUMNS, DEFAULTS, ColumnValue, read_record, seal_pair, seal_row
from convoy.perfdb.row import Measurement

_FIRST_COLUMNS: Final = 17
STORED_COLUMNS: Final = (*[*COLUMNS][:_FIRST_COLUMNS], "seal", *[*COLUMNS][_FIRST_COLUMNS:])
"""The order of a stored row's values: the columns of version 1, the seal, then the columns added since."""


def verified_record(values: tuple[Any, ...]) -> dict[str, ColumnValue]:
    """A row's record from its stored values; raises DamagedFileError unless they are what was written.

    A row with fewer values than `STORED_COLUMNS` was written before the last columns were added.
    """
    stored = dict(zip(STORED_COLUMNS, values, strict=False))
    seal = stored.pop("seal", None)
    try:
        record = {**DEFAULTS, **{name: COLUMNS[name](value) for name, value in stored.items()}}
        intact = len(record) == len(COLUMNS) and seal_row(record) == seal
    except (TypeError, ValueError, OverflowError):
        intact, record = False, {}
    if not intact:
        raise DamagedFileError("a row differs from what was written")
    return {name: record[name] for name in COLUMNS}


def verified_rows(found: Iterable[tuple[Any, ...]]) -> list[Measurement]:
    """The measurements that this version of Convoy understands, as `verified_record` returns them."""
    rows: list[Measurement] = []
    for values in found:
        record = verified_record(values)
        # A row of a newer Convoy with the same tables (an unknown kind of problem, say) is no damage: it is skipped.
        with suppress(InputError):
            rows.append(read_record(record))
    return rows


def verified_pair(table: str, values: tuple[Any, ...]) -> tuple[str, str]:
    """Key and text from a row of `texts`, `targets` or `plans`; raises DamagedFileError unless they are what was written."""
    key, text, seal = values
    if not isinstance(key, str) or not isinstance(text, str) or seal_pair(table, key, text) != seal:
        raise DamagedFileError(f"a row of {table} differs from what was written")
    return key, text
