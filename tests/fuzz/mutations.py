"""Seeded mutations of files: of bytes, of words, and of JSON's values."""

from __future__ import annotations

import json
import random
import re
from typing import Any, Final

STRANGE: Final[tuple[Any, ...]] = (
    None, True, False, 0, -1, 1, 2**31, 2**53 + 1, 2**63, 10**400, 0.5, -0.0, 1e308, float("inf"), float("nan"), "", "x", "\x00",
    "\x1b[2J", "\u202e", "\ud800", "é", "../../etc/passwd", "x" * 5000, "9" * 400, [], {}, [[]], [None], {"a": 1}, [1, "a", {}],
)  # fmt: skip
"""Values of JSON that a reader may not expect where they stand."""

WORDS: Final = (
    b"", b"null", b"true", b"-1", b"0", b"1e999", b"NaN", b"Infinity", b"9" * 400, b"1" * 5000, b"{", b"}", b"[", b"]", b'"',
    b"\\", b"\\ud800", b"\\u0000", b",", b":", b"\n", b"\r\n", b"\x00", b"\xff\xfe", b"\xed\xa0\x80", b"\x1b[31m", b"%", b"(",
    b")", b"nhwc", b"blocked", b"@", b"=", b"[" * 990, b"(" * 400, b"\xe2\x80\xae",
)  # fmt: skip
"""Texts that a parser may stumble over."""

_WORD: Final = re.compile(rb"[A-Za-z0-9_.+-]+")


def mutated(data: bytes, draw: random.Random, others: list[bytes]) -> bytes:
    """Bytes with one to four things changed.

    Args:
        data: a good file's content.
        draw: the source of chance.
        others: other files' contents, of which parts may be put in.
    """
    if draw.random() < 0.4:
        changed = _changed_json(data, draw)
        if changed is not None:
            return changed
    found = bytearray(data)
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        draw.choice(_CHANGES)(found, draw, others)
    return bytes(found)


def _place(found: bytearray, draw: random.Random) -> int:
    return draw.randrange(len(found) + 1)


def _flip(found: bytearray, draw: random.Random, others: list[bytes]) -> None:
    if found:
        found[draw.randrange(len(found))] ^= 1 << draw.randrange(8)


def _put(found: bytearray, draw: random.Random, others: list[bytes]) -> None:
    at = _place(found, draw)
    found[at:at] = draw.choice(WORDS)


def _remove(found: bytearray, draw: random.Random, others: list[bytes]) -> None:
    at = _place(found, draw)
    del found[at : at + draw.choice((1, 2, 8, 100))]


def _cut_off(found: bytearray, draw: random.Random, others: list[bytes]) -> None:
    del found[_place(found, draw) :]


def _repeat(found: bytearray, draw: random.Random, others: list[bytes]) -> None:
    at = _place(found, draw)
    found[at:at] = found[at : at + draw.choice((1, 10, 200))] * draw.choice((1, 2, 50))


def _splice(found: bytearray, draw: random.Random, others: list[bytes]) -> None:
    other = draw.choice(others)
    at, start = _place(found, draw), draw.randrange(len(other) + 1)
    found[at : at + draw.choice((0, 20))] = other[start : start + draw.choice((5, 50, 500))]


def _replace_word(found: bytearray, draw: random.Random, others: list[bytes]) -> None:
    """One word by another of the file, or by a strange one: what keeps most files well formed."""
    start = draw.randrange(len(found) + 1)
    words = list(_WORD.finditer(bytes(found[start : start + 300])))
    if words:
        one, other = draw.choice(words), draw.choice(words)
        found[start + one.start() : start + one.end()] = draw.choice((other[0], draw.choice(WORDS)))


def _number(found: bytearray, draw: random.Random, others: list[bytes]) -> None:
    """Four bytes as an integer of a binary file."""
    at = _place(found, draw)
    value = draw.choice((0, 1, 0x7F, 0xFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 0x80000000))
    found[at : at + 4] = value.to_bytes(4, draw.choice(("big", "little")))


_CHANGES: Final = (_flip, _flip, _put, _put, _remove, _cut_off, _repeat, _splice, _replace_word, _replace_word, _number)


def _changed_json(data: bytes, draw: random.Random) -> bytes | None:
    """A file of JSON, or one line of several, with one value changed; None where it is none."""
    lines = data.splitlines(keepends=True)
    at = draw.randrange(len(lines)) if lines else 0
    for part in (data, lines[at] if lines else b""):
        try:
            value = json.loads(part)
        except (ValueError, RecursionError):
            continue
        text = json.dumps(_other(value, draw)).encode()
        return text if part is data else b"".join((*lines[:at], text, b"\n", *lines[at + 1 :]))
    return None


def _other(value: Any, draw: random.Random) -> Any:
    """A value of JSON with one thing in it changed, at any depth."""
    if isinstance(value, dict) and value and draw.random() < 0.9:
        name = draw.choice(list(value))
        how = draw.random()
        if how < 0.1:
            return {k: v for k, v in value.items() if k != name}
        if how < 0.2:
            return {**value, draw.choice(("extra", "", "\ud800", name + "x")): draw.choice(STRANGE)}
        return {**value, name: _other(value[name], draw)}
    if isinstance(value, list) and value and draw.random() < 0.9:
        at = draw.randrange(len(value))
        if draw.random() < 0.15:
            return value[:at] + value[at : at + 1] * draw.choice((0, 2, 50)) + value[at + 1 :]
        return [*value[:at], _other(value[at], draw), *value[at + 1 :]]
    if isinstance(value, int) and not isinstance(value, bool) and draw.random() < 0.3:
        return value + draw.choice((-1, 1, 7, -value))
    return draw.choice(STRANGE)
