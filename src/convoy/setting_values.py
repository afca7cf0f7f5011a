"""Values of settings, converted to the types of their fields; InputError names the field of a wrong one."""

from __future__ import annotations

import math
import operator
import os
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Final, SupportsFloat, SupportsIndex, cast

from convoy.errors import InputError, unknown_name

MOST_DIGITS: Final = 9
"""Digits of the longest number of things in a text. Python refuses to read numbers of thousands of digits."""


def is_count(text: str) -> bool:
    """Whether a text is an integer of at least 1, in plain digits."""
    return text.isascii() and text.isdecimal() and len(text) <= MOST_DIGITS and int(text) > 0


def read_word(kind: type[StrEnum]) -> Callable[[str, object], StrEnum]:
    """Reads one of the words of an enum, or a member of it."""

    def read(name: str, value: object) -> StrEnum:
        if not isinstance(value, str) or value not in {str(member) for member in kind}:
            raise unknown_name(name, value, kind)
        return kind(value)

    return read


def read_flag(name: str, value: object) -> bool:
    """Read True or False, NumPy's too."""
    # NumPy's booleans are no subclass of `bool`.
    if isinstance(value, bool) or type(value).__name__ in ("bool", "bool_"):
        return bool(value)
    raise InputError(name, value, "True or False")


def read_integer(
    low: int, high: int | None, expected: str, *, optional: bool = False
) -> Callable[[str, object], int | None]:
    """Reads an integer from `low` to `high` (None: no limit); None too if it is optional."""

    def read(name: str, value: object) -> int | None:
        if value is None and optional:
            return None
        if isinstance(value, SupportsIndex) and not isinstance(value, bool):
            try:
                found = operator.index(value)
            except TypeError:  # a tensor or an array: only those of one integer are numbers
                raise InputError(name, cast("object", value), expected) from None
            if low <= found and (high is None or found <= high):
                return found
        raise InputError(name, value, expected)

    return read


def read_number(low: float, expected: str, *, open_end: bool, finite: bool) -> Callable[[str, object], float]:
    """Reads a number of at least `low`, or above it with `open_end`; NaN is refused."""

    def read(name: str, value: object) -> float:
        if isinstance(value, (SupportsFloat, SupportsIndex)) and not isinstance(value, (bool, str)):
            try:
                found = float(value)
            except (OverflowError, TypeError, ValueError):
                found = math.nan
            if (found > low if open_end else found >= low) and not (finite and math.isinf(found)):
                return found
        raise InputError(name, value, expected)

    return read


def read_names(example: str) -> Callable[[str, object], tuple[str, ...]]:
    """Reads a collection of words; a set becomes a sorted tuple, so that its order is the same in every process."""

    def read(name: str, value: object) -> tuple[str, ...]:
        if isinstance(value, (tuple, list, set, frozenset)):
            found = cast("Collection[object]", value)
            if all(isinstance(item, str) and item for item in found):
                kept = tuple(cast("Collection[str]", found))
                _refuse_repeated(name, kept, kept)
                return tuple(sorted(kept)) if isinstance(value, (set, frozenset)) else kept
        todo = f"Write ({value!r},)." if isinstance(value, str) else ""
        raise InputError(name, cast("object", value), f"a tuple of words, such as {example}", todo)

    return read


def read_engines(name: str, value: object) -> tuple[str, ...]:
    """Read entries `id=module:Class`, one for each id."""
    entries = read_names("('mine=my.module:MyEngine',)")(name, value)
    for entry in entries:
        engine, _, location = entry.partition("=")
        module, _, attribute = location.partition(":")
        if not (engine and module and attribute) or ":" in attribute:
            raise InputError(name, entry, "entries of the form id=module:Class")
    _refuse_repeated(name, entries, [entry.partition("=")[0] for entry in entries])
    return entries


def _refuse_repeated(name: str, value: tuple[str, ...], ids: Sequence[str]) -> None:
    repeated = [one for one, count in Counter(ids).items() if count > 1]
    if repeated:
        raise InputError(name, value, "each id once", f"Repeated: {', '.join(repeated)}.")


def read_path(name: str, value: object) -> Path | None:
    """Read a path, or None."""
    if value is None:
        return None
    if isinstance(value, (str, os.PathLike)):
        found = os.fspath(cast("str | os.PathLike[str]", value))
        if isinstance(found, str) and found and "\0" not in found:  # pyright: ignore[reportUnnecessaryIsInstance]
            return Path(found)
    raise InputError(name, cast("object", value), "a path, or None")
