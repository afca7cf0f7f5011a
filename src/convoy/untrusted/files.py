"""Regular files of untrusted origin: bounded in size."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final

from convoy.errors import InputError
from convoy.untrusted.json_text import MAX_DEPTH, MAX_VALUES, parse_json
from convoy.untrusted.text import size_text

_CHUNK: Final = 1 << 16


@contextmanager
def open_file(
    path: str | Path, most_bytes: int, what: str, error: type[InputError] = InputError
) -> Generator[IO[bytes]]:
    """Open a regular file for reading; FIFOs, devices, sockets and folders are refused without blocking.

    Args:
        path: the file; symbolic links are followed.
        most_bytes: largest size accepted. Limit the bytes read too: another process may append.
        what: the argument's name in errors.
        error: the exception class.

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
            raise error(what, str(path), "a regular file", "Folders, pipes and devices are refused.")
        if found.st_size > most_bytes:
            raise error(what, str(path), f"a file of at most {size_text(most_bytes)}", f"It has {found.st_size} bytes.")
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
        raise error(what, str(path), f"a file of at most {size_text(most_bytes)}")
    return data


def read_at_most(file: IO[bytes], most_bytes: int) -> bytes:
    """The next bytes of a file; memory is allocated for the bytes that exist, not for the limit."""
    parts: list[bytes] = []
    while most_bytes and (part := file.read(min(most_bytes, _CHUNK))):
        parts.append(part)
        most_bytes -= len(part)
    return b"".join(parts)


def read_text(path: str | Path, most_bytes: int, what: str, error: type[InputError] = InputError) -> str:
    """The whole content of a regular UTF-8 file.

    Raises:
        InputError: as `read_bytes` does, or bytes that are not UTF-8.
    """
    data = read_bytes(path, most_bytes, what, error)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as cause:
        raise error(what, str(path), "text in UTF-8", f"Byte {cause.start} is invalid.") from None


def read_json(
    path: str | Path,
    most_bytes: int,
    what: str,
    error: type[InputError] = InputError,
    *,
    most_depth: int = MAX_DEPTH,
    most_values: int = MAX_VALUES,
) -> Any:
    """`parse_json` of a file's text; errors name `what` and the path.

    Raises:
        InputError: as `read_text` and `parse_json` do.
    """
    text = read_text(path, most_bytes, what, error)
    return parse_json(text, f"{what} {path}", error, most_depth=most_depth, most_values=most_values)
