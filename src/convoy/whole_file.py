"""Result files that users name: written completely or not at all, and never in the place of a device, a pipe or a link."""

from __future__ import annotations

import glob
import os
import secrets
import stat
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from convoy.errors import InputError

_TOKEN_BYTES: Final = 4
"""Random bytes in the name of a temporary file, which has two hexadecimal digits for each."""

_LONGEST_NAME: Final = 60
"""Characters of the file's own name in it: file systems allow 255 bytes, and a character has up to four."""


def replaceable_file(path: Path, argument: str) -> Path:
    """The file that results for `path` go to: where a symbolic link leads, so that the link stays; else `path` itself.

    Args:
        path: a regular file, or a new name in a folder that exists.
        argument: its name in errors.

    Raises:
        InputError: a folder, a device, a pipe or a socket; its folder does not exist; or no path can be like that.
    """
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        mode = None
    except (OSError, ValueError) as error:  # a path with a NUL is a ValueError
        raise InputError(argument, str(path), "a path that can be written", str(error)) from error
    target = Path(os.path.realpath(path)) if path.is_symlink() else path
    if path.is_dir() or not target.parent.is_dir():
        raise InputError(argument, str(path), "a file in a folder that exists")
    # Root may rename a file onto /dev/null, and then no program of the machine finds the device again.
    if mode is not None and not stat.S_ISREG(mode):
        raise InputError(
            argument, str(path), "a regular file or a new one", "Devices, pipes and sockets are not replaced."
        )
    return target


@contextmanager
def whole_file(path: Path, argument: str) -> Generator[Path]:
    """A temporary path beside the file: when the block ends it replaces the file, after an error it is deleted.

    Args:
        path: as for `replaceable_file`.
        argument: its name in errors.

    Raises:
        InputError: as `replaceable_file` does.
        OSError: the temporary file cannot be renamed.
    """
    target = replaceable_file(path, argument)
    # Not by `tempfile`, which makes files that only their owner can read; the umask decides.
    temporary = target.with_name(_temporary_prefix(target) + secrets.token_hex(_TOKEN_BYTES))
    try:
        yield temporary
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def unfinished_files(path: Path) -> list[Path]:
    """What processes that were killed inside `whole_file` left beside a file."""
    target = Path(os.path.realpath(path))
    return list(target.parent.glob(glob.escape(_temporary_prefix(target)) + "[0-9a-f]" * (2 * _TOKEN_BYTES)))


def _temporary_prefix(target: Path) -> str:
    return f".{target.name[:_LONGEST_NAME]}."
