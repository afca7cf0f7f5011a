"""Sizes and removes what lies in the folder of compiled code."""

from __future__ import annotations

import os
import re
import shutil
import stat
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from convoy.engines.compilers import compiled_cache
from convoy.errors import InputError

_COMPILED: Final = re.compile(r"[\w.-]+-[0-9a-f]{24}\.(?:so|cubin|json)")
_UNFINISHED: Final = ".building-"

UNFINISHED_S: Final = 24 * 3600.0
"""Age after which a process cannot still be at work on an unfinished file."""


@dataclass(frozen=True, slots=True)
class CompiledCode:
    """Files of compiled code.

    Attributes:
        path: their folder.
        files: number of files.
        size_bytes: their joint size.
    """

    path: Path
    files: int
    size_bytes: int


def compiled_code() -> CompiledCode:
    """The compiled code that is kept."""
    with _opened() as (path, descriptor):
        sizes = [found.st_size for _, found in _files(descriptor)]
    return CompiledCode(path, len(sizes), sum(sizes))


def clear_compiled() -> CompiledCode:
    """Remove compiled code, and what interrupted compilers left; what was removed. Other files stay.

    A process that has loaded a file keeps it. One that compiles now writes its file afterwards.

    Raises:
        InputError: the folder is not the user's own.
    """
    removed: list[int] = []
    with _opened() as (path, descriptor):
        for name, found in _files(descriptor):
            with suppress(FileNotFoundError):  # another process was first
                if stat.S_ISDIR(found.st_mode):
                    shutil.rmtree(name, dir_fd=descriptor)
                else:
                    os.unlink(name, dir_fd=descriptor)
                removed.append(found.st_size)
    return CompiledCode(path, len(removed), sum(removed))


@contextmanager
def _opened() -> Generator[tuple[Path, int]]:
    """The folder's path, and a descriptor of it; -1 if there is no folder."""
    path = compiled_cache.cache_folder() / "compiled"
    descriptor = -1
    try:
        with suppress(FileNotFoundError):
            if sys.platform == "win32":  # nothing is compiled there
                raise FileNotFoundError
            reason = compiled_cache.why_not_folder(path.lstat())
            if reason:
                raise InputError("compiled code", str(path), "a folder of your own", f"{reason}; remove it yourself.")
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        yield path, descriptor
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _files(descriptor: int) -> list[tuple[str, os.stat_result]]:
    """Names and states of compiled code, and of old unfinished files."""
    found: list[tuple[str, os.stat_result]] = []
    for name in os.listdir(descriptor) if descriptor >= 0 else ():
        with suppress(FileNotFoundError):
            state = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
            old = name.startswith(_UNFINISHED) and time.time() - state.st_mtime > UNFINISHED_S
            if old or (_COMPILED.fullmatch(name) and stat.S_ISREG(state.st_mode)):
                found.append((name, state))
    return found
