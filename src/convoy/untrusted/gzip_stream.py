"""Gzip files of untrusted origin: bounded in decompressed size and in parts."""

from __future__ import annotations

import io
import zlib
from typing import IO, Any, Final

from convoy.errors import InputError
from convoy.untrusted.text import size_text

_CHUNK: Final = 1 << 16
_GZIP: Final = 31
"""zlib's value for a gzip header and trailer."""
_MAX_MEMBERS: Final = 1000
"""Most parts of a gzip file, as `cat a.gz b.gz` makes them: each takes time and may be empty."""


class _Gunzip(io.RawIOBase):
    """The content of a gzip file up to a limit; it holds two chunks in memory."""

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
            raise self._error(
                self._what, f"more than {self._most} bytes", f"at most {size_text(self._most)} decompressed"
            )
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
    """A stream of a gzip file's content, at most `most_bytes` bytes, in bounded memory.

    Raises:
        InputError: while it is read, for damage and for more bytes.
    """
    return io.BufferedReader(_Gunzip(file, most_bytes, what, error))
