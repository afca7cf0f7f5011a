"""Checks of JSON's values in run files: types, lengths and ranges, with errors that name the field. No torch."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, cast

from convoy.errors import InputError

LONGEST_TEXT: Final = 20_000
LONGEST_NAME: Final = 1_000
MOST_ITEMS: Final = 20_000
"""Of a list or an object inside a row or a manifest."""
LARGEST: Final = 1e30
"""Largest figure: sums and products of a few stay finite."""

_WORD = re.compile(r"[A-Za-z][A-Za-z0-9_.+-]{0,99}")


def mapping(data: object, where: str) -> dict[str, Any]:
    """An object."""
    if not isinstance(data, dict):
        raise InputError(where, data, "an object of JSON")
    return cast("dict[str, Any]", data)


def listed(data: object, where: str) -> list[Any]:
    """A list."""
    if not isinstance(data, list):
        raise InputError(where, data, "a list")
    return cast("list[Any]", data)


def text(data: object, where: str, most: int = LONGEST_TEXT) -> str:
    """A text of at most `most` characters."""
    if not isinstance(data, str) or len(data) > most:
        raise InputError(where, data, f"a text of at most {most} characters")
    return data


def word(data: object, where: str) -> str:
    """A word of ASCII letters, digits and `_.+-`."""
    if not isinstance(data, str) or not _WORD.fullmatch(data):
        raise InputError(where, data, "a word")
    return data


def count(data: object, where: str, least: int = 1) -> int:
    """An integer of at least `least`."""
    if isinstance(data, bool) or not isinstance(data, int) or not least <= data <= 2**53:
        raise InputError(where, data, f"an integer of at least {least}")
    return data


def flag(data: object, where: str) -> bool:
    """True or false."""
    if not isinstance(data, bool):
        raise InputError(where, data, "true or false")
    return data


def number(data: object, where: str) -> float:
    """A number whose size is at most `LARGEST`."""
    if isinstance(data, bool) or not isinstance(data, int | float) or not -LARGEST <= data <= LARGEST:
        raise InputError(where, data, f"a number of at most {LARGEST:g}")
    return float(data)


def positive(data: object, where: str) -> float:
    """A number of at least 0."""
    found = number(data, where)
    if found < 0 or math.isnan(found):
        raise InputError(where, data, "a number of at least 0")
    return found


Check = Callable[[object, str], object]
"""Takes a value and the field's name; raises InputError."""


def items(check: Check) -> Check:
    """A list of some values."""

    def check_list(data: object, where: str) -> None:
        found = listed(data, where)
        if len(found) > MOST_ITEMS:
            raise InputError(where, len(found), f"at most {MOST_ITEMS} items")
        for index, item in enumerate(found):
            check(item, f"{where}[{index}]")

    return check_list


def values(check: Check) -> Check:
    """An object of some values, by any name."""

    def check_values(data: object, where: str) -> None:
        found = mapping(data, where)
        if len(found) > MOST_ITEMS:
            raise InputError(where, len(found), f"at most {MOST_ITEMS} names")
        for name, value in found.items():
            check(value, f"{where}.{name}")

    return check_values


def optional(check: Check) -> Check:
    """Null, or a value."""

    def check_some(data: object, where: str) -> None:
        if data is not None:
            check(data, where)

    return check_some


def fields(needed: Mapping[str, Check], known: Mapping[str, Check] | None = None) -> Check:
    """An object with some fields; those that are only known may be left out, and others are not looked at."""

    def check_fields(data: object, where: str) -> None:
        found = mapping(data, where)
        for name, check in needed.items():
            if name not in found:
                raise InputError(where, sorted(found)[:20], f"a field {name}")
            check(found[name], f"{where}.{name}")
        for name, check in (known or {}).items():
            if name in found:
                check(found[name], f"{where}.{name}")

    return check_fields


def exactly(needed: Mapping[str, Check]) -> Check:
    """An object with these fields and no others."""
    check_needed = fields(needed)

    def check_exactly(data: object, where: str) -> None:
        check_needed(data, where)
        unknown = sorted(mapping(data, where).keys() - needed.keys())
        if unknown:
            raise InputError(where, unknown[0], "one of " + ", ".join(needed))

    return check_exactly


def scalar(data: object, where: str) -> None:
    """A text, a number, true, false or null."""
    if isinstance(data, str):
        text(data, where)
    elif data is not None and not isinstance(data, bool):
        number(data, where)


def anything(data: object, where: str) -> None:
    """Any value: it is shown by its text alone."""
    del data, where
