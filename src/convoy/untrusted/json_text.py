"""JSON of untrusted origin: bounded in depth, count and numbers."""

from __future__ import annotations

import json
import math
import re
from typing import Any, Final, cast

from convoy.errors import InputError
from convoy.untrusted.text import escape_controls

MAX_DEPTH: Final = 64
"""Most nested objects and lists: no file of Convoy has more than 20, and readers are recursive."""

MAX_VALUES: Final = 1_000_000
"""Most values of one JSON text: at worst about 100 MiB of Python objects."""

MAX_DIGITS: Final = 20
"""Most characters of an integer: 64 bits and a sign."""

_ESCAPED_SURROGATE: Final = re.compile(r"\\u[dD][89a-fA-F]")


def parse_json(
    text: str | bytes,
    what: str,
    error: type[InputError] = InputError,
    *,
    most_depth: int = MAX_DEPTH,
    most_values: int = MAX_VALUES,
) -> Any:
    """Strict JSON: finite numbers, 64-bit integers, no duplicate keys in an object, no lone surrogates.

    Args:
        text: the text, or its bytes in UTF-8. The caller bounds its length.
        what: its name in errors.
        error: the exception class.
        most_depth: most nested objects and lists.
        most_values: most values in all (brackets, commas and colons are counted, inside strings too).

    Raises:
        InputError: naming what is wrong.
    """

    def refuse(expected: str, said: str = "") -> InputError:
        return error(what, text[:80], expected, said)

    if isinstance(text, bytes):
        try:
            text = text.decode("utf-8")
        except UnicodeDecodeError as cause:
            raise refuse("text in UTF-8", f"Byte {cause.start} is invalid.") from None
    if sum(map(text.count, "[{,:")) > most_values:
        raise refuse(f"JSON of at most {most_values} values")
    try:
        data = _DECODER.decode(text)
    except (ValueError, RecursionError) as cause:
        raise refuse("JSON", f"It says: {escape_controls(str(cause)[:200])}.") from None
    if _is_deeper(data, most_depth):
        raise refuse(f"at most {most_depth} objects and lists inside one another")
    if _ESCAPED_SURROGATE.search(text) and _has_surrogate(data):
        raise refuse("text that UTF-8 can encode")
    return data


def _integer(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"an integer of {len(text)} characters")
    return int(text)


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is too large for a 64-bit float")
    return value


def _constant(word: str) -> None:
    raise ValueError(f"{word} is no number of JSON")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise ValueError(f"{twice[:40]!r} stands twice in one object")
    return found


_DECODER: Final = json.JSONDecoder(
    object_pairs_hook=_object, parse_float=_float, parse_int=_integer, parse_constant=_constant
)


def _children(level: list[Any]) -> list[Any]:
    """Everything that the objects and lists of one level contain, keys too."""
    found: list[Any] = []
    for item in level:
        if isinstance(item, dict):
            found.extend(cast("dict[str, Any]", item))
            found.extend(cast("dict[str, Any]", item).values())
        else:
            found.extend(item)
    return found


def _is_deeper(data: object, most: int) -> bool:
    level: list[Any] = [data]
    for _ in range(most + 1):
        level = [item for item in level if isinstance(item, dict | list)]
        if not level:
            return False
        level = _children(level)
    return True


def _has_surrogate(data: object) -> bool:
    level: list[Any] = [data]
    while level:
        if any(isinstance(item, str) and _is_lone(item) for item in level):
            return True
        level = _children([item for item in level if isinstance(item, dict | list)])
    return False


def _is_lone(text: str) -> bool:
    return not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text)
