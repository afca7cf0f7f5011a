"""Files from elsewhere, read as if an enemy had written them: regular files alone, bounded in size, depth, count and numbers.

Every damage is one InputError (or the subclass that the caller names). Nothing here imports torch.
"""

from __future__ import annotations

import errno
import io
import json
import math
import os
import re
import stat
import zlib
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final, cast

from convoy.errors import InputError

MAX_DEPTH: Final = 64
"""Most objects and lists of JSON inside one another: no file of ours has more than 20, and readers call themselves."""

MAX_VALUES: Final = 1_000_000
"""Most values of one JSON text: about 100 MiB of Python objects at worst."""

MAX_DIGITS: Final = 20
"""Most characters of an integer: 64 bits and a sign."""

_CHUNK: Final = 1 << 16
_GZIP: Final = 31
"""zlib's word for a gzip header and trailer."""
_MAX_MEMBERS: Final = 1000
"""Most parts of a gzip file, as `cat a.gz b.gz` makes them: each costs time and may be empty."""
_ESCAPED_SURROGATE: Final = re.compile(r"\\u[dD][89a-fA-F]")
_UNPRINTABLE: Final = re.compile(r"[^\x20-\x7e\n\t]")


@contextmanager
def open_file(
    path: str | Path, most_bytes: int, what: str, error: type[InputError] = InputError
) -> Generator[IO[bytes]]:
    """Open a regular file for reading; FIFOs, devices, sockets and folders are refused without waiting for a writer.

    Args:
        path: the file; symbolic links are followed.
        most_bytes: largest size accepted. Limit what is read too: another process may append.
        what: the argument's name in errors.
        error: the class raised.

    Raises:
        InputError: it cannot be opened, is no regular file or is too large.
    """
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOCTTY", 0)
    try:
        descriptor = os.open(path, flags | getattr(os, "O_BINARY", 0))
    except (OSError, ValueError) as cause:
        said = os.strerror(cause.errno) if isinstance(cause, OSError) and cause.errno else str(cause)
        # A socket cannot be opened at all.
        expected = "a regular file" if getattr(cause, "errno", None) == errno.ENXIO else "a file that can be read"
        raise error(what, str(path), expected, said) from cause
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise error(what, str(path), "a regular file", "Folders, pipes and devices are not read.")
        if found.st_size > most_bytes:
            raise error(what, str(path), f"a file of at most {_size(most_bytes)}", f"It has {found.st_size} bytes.")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            yield file
    finally:
        os.close(descriptor)


def read_bytes(path: str | Path, most_bytes: int, what: str, error: type[InputError] = InputError) -> bytes:
    """The whole content of a regular file of at most `most_bytes` bytes.

    Raises:
        InputError: as `open_file` does, or reading fails.
    """
    with open_file(path, most_bytes, what, error) as file:
        try:
            data = read_at_most(file, most_bytes + 1)
        except OSError as cause:
            raise error(what, str(path), "a file that can be read", str(cause.strerror)) from cause
    if len(data) > most_bytes:
        raise error(what, str(path), f"a file of at most {_size(most_bytes)}")
    return data


def read_at_most(file: IO[bytes], most_bytes: int) -> bytes:
    """The next bytes of a file: memory is taken for those that are there, not for the limit."""
    parts: list[bytes] = []
    while most_bytes and (part := file.read(min(most_bytes, _CHUNK))):
        parts.append(part)
        most_bytes -= len(part)
    return b"".join(parts)


def read_text(path: str | Path, most_bytes: int, what: str, error: type[InputError] = InputError) -> str:
    """The whole content of a regular file of UTF-8 text.

    Raises:
        InputError: as `read_bytes` does, or bytes that are not UTF-8.
    """
    data = read_bytes(path, most_bytes, what, error)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as cause:
        raise error(what, str(path), "text in UTF-8", f"Byte {cause.start} is none.") from None


def read_json(
    path: str | Path,
    most_bytes: int,
    what: str,
    error: type[InputError] = InputError,
    *,
    most_depth: int = MAX_DEPTH,
    most_values: int = MAX_VALUES,
) -> Any:
    """`parse_json` of a file's text; `what` and the path name it in errors.

    Raises:
        InputError: as `read_text` and `parse_json` do.
    """
    text = read_text(path, most_bytes, what, error)
    return parse_json(text, f"{what} {path}", error, most_depth=most_depth, most_values=most_values)


def parse_json(
    text: str | bytes,
    what: str,
    error: type[InputError] = InputError,
    *,
    most_depth: int = MAX_DEPTH,
    most_values: int = MAX_VALUES,
) -> Any:
    """JSON as the standard says: finite numbers, 64-bit integers, each key of an object once, no lone surrogates.

    Args:
        text: the text, or its bytes in UTF-8. The caller bounds its length.
        what: its name in errors.
        error: the class raised.
        most_depth: most objects and lists inside one another.
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
            raise refuse("text in UTF-8", f"Byte {cause.start} is none.") from None
    if sum(map(text.count, "[{,:")) > most_values:
        raise refuse(f"JSON of at most {most_values} values")
    try:
        data = _DECODER.decode(text)
    except (ValueError, RecursionError) as cause:
        raise refuse("JSON", f"It says: {escape_controls(str(cause)[:200])}.") from None
    if _is_deeper(data, most_depth):
        raise refuse(f"at most {most_depth} objects and lists inside one another")
    if _ESCAPED_SURROGATE.search(text) and _has_surrogate(data):
        raise refuse("text that UTF-8 can hold")
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
    """Everything that the objects and lists of one level hold, keys too."""
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


class _Gunzip(io.RawIOBase):
    """The content of a gzip file, of which no more than a limit is given; memory holds two chunks of it."""

    def __init__(self, source: IO[bytes], most_bytes: int, what: str, error: type[InputError]) -> None:
        super().__init__()
        self._source, self._most, self._what, self._error = source, most_bytes, what, error
        self._left, self._members = most_bytes, 1
        self._pending = b""
        self._inflate = zlib.decompressobj(_GZIP)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._next(min(len(buffer), self._left + 1, _CHUNK))
        if len(data) > self._left:
            raise self._error(self._what, f"more than {self._most} bytes", f"at most {_size(self._most)} decompressed")
        self._left -= len(data)
        buffer[: len(data)] = data
        return len(data)

    def _next(self, most: int) -> bytes:
        """Some bytes, at most `most`; none at the end."""
        while True:
            self._pending = self._pending or self._source.read(_CHUNK)
            if self._inflate.eof:
                if not self._pending:
                    return b""
                self._members += 1
                if self._members > _MAX_MEMBERS:
                    raise self._error(self._what, f"{self._members} parts", f"a gzip file of at most {_MAX_MEMBERS}")
                self._inflate = zlib.decompressobj(_GZIP)
            try:
                data = self._inflate.decompress(self._pending, most)
            except zlib.error as cause:
                raise self._error(self._what, str(cause), "a whole gzip file") from None
            ended = not self._pending and not data
            self._pending = self._inflate.unused_data or self._inflate.unconsumed_tail
            if data:
                return data
            if ended and not self._inflate.eof:
                raise self._error(self._what, "the end", "a whole gzip file")


def gunzip(file: IO[bytes], most_bytes: int, what: str, error: type[InputError] = InputError) -> io.BufferedReader:
    """A stream of a gzip file's content that gives at most `most_bytes` bytes, and uses no memory for more.

    Raises:
        InputError: while it is read, for damage and for more bytes.
    """
    return io.BufferedReader(_Gunzip(file, most_bytes, what, error))


def escape_controls(text: str, *, one_line: bool = False) -> str:
    r"""Text for a terminal: control characters, bidirectional overrides and lone surrogates as `\x1b`, `\u202e`, `\udc80`.

    Args:
        text: any text.
        one_line: escape tabs and line feeds too; otherwise a text of several lines stays one.
    """
    shown = _UNPRINTABLE.sub(lambda match: _escaped(match[0]), text)
    return shown.replace("\n", "\\n").replace("\t", "\\t") if one_line else shown


def storable(text: str, longest: int) -> str:
    """Text as a file of ours holds it: what UTF-8 cannot hold (names of files have such bytes) is replaced, the rest cut off."""
    clean = text.encode("utf-8", "replace").decode()
    return clean if len(clean) <= longest else clean[: longest - 1] + "…"


def _escaped(character: str) -> str:
    if character.isprintable():
        return character
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _size(count: int) -> str:
    return f"{count >> 20} MiB" if count >= 1 << 20 else f"{count} bytes"
