"""A built plan as text that cuDNN itself can read back, in another process and without the frontend.

`Graph::serialize` of the frontend writes one object in UBJSON (Universal Binary JSON, draft 12). It has the text of cuDNN's plan,
and what the frontend does around a run of the plan. Convoy's graphs need nothing of the latter, and this is checked.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any, Final, cast

from convoy.errors import CompileError

_PLAN: Final = "cudnn_backend_data"

_AROUND: Final = (
    "pass_by_values", "workspace_modifications", "variant_pack_replacements", "aligned_operands", "fe_workspace_size",
)  # fmt: skip
"""Keys that say which work the frontend does before or after a run; empty or 0: none."""

_NUMBERS: Final[Mapping[bytes, str]] = {
    b"i": ">b", b"U": ">B", b"I": ">h", b"l": ">i", b"L": ">q", b"d": ">f", b"D": ">d",
}  # fmt: skip
"""Marker → format of `struct`."""

_CONSTANTS: Final[Mapping[bytes, object]] = {b"Z": None, b"T": True, b"F": False}


def plan_text(graph: Any) -> str:
    """The JSON text of the plan that was built last in a graph of the frontend's.

    Raises:
        CompileError: the frontend's answer cannot be read, or the plan's run needs the frontend.
    """
    try:
        found = read_ubjson(bytes(graph.serialize()))
    except ValueError as error:
        raise CompileError("cudnn", f"the frontend's text of a plan cannot be read: {error}") from error
    data = cast("dict[str, Any]", found) if isinstance(found, dict) else {}
    text = data.get(_PLAN)
    if not isinstance(text, str) or not text:
        raise CompileError("cudnn", "this version of cuDNN gives no text of a plan")
    around = [key for key in _AROUND if data.get(key)]
    if around:
        raise CompileError("cudnn", f"a run of the plan needs the frontend: {', '.join(around)}")
    return text


def read_ubjson(raw: bytes) -> object:
    """The value that bytes hold; raises ValueError if they hold none, or more than one."""
    reader = _Reader(raw)
    found = reader.value(reader.marker())
    if reader.at != len(raw):
        raise ValueError(f"{len(raw) - reader.at} bytes behind the value")
    return found


class _Reader:
    """Reads values one behind the other; containers without the optional types and counts, as the frontend writes them."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw
        self.at = 0

    def take(self, count: int) -> bytes:
        found = self._raw[self.at : self.at + count]
        if len(found) != count or count < 0:
            raise ValueError(f"{count} bytes are missing at {self.at}")
        self.at += count
        return found

    def marker(self) -> bytes:
        return self.take(1)

    def value(self, marker: bytes) -> object:
        if marker in _CONSTANTS:
            return _CONSTANTS[marker]
        if marker in _NUMBERS:
            form = _NUMBERS[marker]
            return struct.unpack(form, self.take(struct.calcsize(form)))[0]
        if marker == b"S":
            return self._text(self.marker())
        if marker == b"[":
            return self._items()
        if marker == b"{":
            return self._entries()
        raise ValueError(f"marker {marker!r} at {self.at - 1}")

    def _text(self, marker: bytes) -> str:
        length = self.value(marker)
        if not isinstance(length, int) or isinstance(length, bool):
            raise ValueError(f"a length {length!r} at {self.at}")
        return self.take(length).decode()

    def _items(self) -> list[object]:
        found: list[object] = []
        while (marker := self.marker()) != b"]":
            found.append(self.value(marker))
        return found

    def _entries(self) -> dict[str, object]:
        found: dict[str, object] = {}
        while (marker := self.marker()) != b"}":
            name = self._text(marker)
            found[name] = self.value(self.marker())
        return found
