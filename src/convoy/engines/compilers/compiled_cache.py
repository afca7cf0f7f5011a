"""The folder of compiled code: only the user can write to it, and each file is checked before it is loaded.

Loaded code runs with the user's rights. The folder must belong to the user, be no symbolic link, and be closed to everyone
else. A file in it must be a regular file that only the user or root can write to, and must end with the SHA-256 of the bytes
before it. The folder is opened once and files are opened relative to it, so that a folder which another process puts in its
place later is never read.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import shutil
import stat
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from convoy.perfdb.location import cache_folder
from convoy.user_warning import warn_user

MARK: Final = b"\nconvoy-sha256:"
"""Marks the checksum behind a library; the loader does not read past the library's own end."""

DIGEST_BYTES: Final = 32

MOST_BYTES: Final = 256 << 20
"""Of one file: kernels have kilobytes, generated code for a large sparse layer some megabytes."""

_PRIVATE: Final = 0o700
_OTHERS_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH


@dataclass(frozen=True, slots=True)
class Folder:
    """An opened folder of compiled code.

    Attributes:
        path: where it lies, for messages and for new files.
        descriptor: the folder as it was when it was checked.
    """

    path: Path
    descriptor: int

    def read(self, name: str) -> bytes | None:
        """A file without its sum; None where it is not there, not whole, or could be somebody else's."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            descriptor = os.open(name, flags, dir_fd=self.descriptor)
        except OSError:
            return None
        with os.fdopen(descriptor, "rb") as file:
            found = os.fstat(file.fileno())
            if not is_trusted_file(found):
                return None
            try:
                return whole(file.read(found.st_size))
            except OSError:
                return None

    def loadable(self, name: str) -> str:
        """A path for the loader that leads through the opened folder."""
        through = f"/proc/self/fd/{self.descriptor}"
        return f"{through}/{name}" if Path(through).is_dir() else str(self.path / name)


def whole(content: bytes) -> bytes | None:
    """The bytes before the checksum at the end of a file; None if the checksum is wrong."""
    body, digest = content[:-DIGEST_BYTES], content[-DIGEST_BYTES:]
    if not body or len(content) > MOST_BYTES:
        return None
    body = body.removesuffix(MARK)
    return body if hashlib.sha256(body).digest() == digest else None


def summed(body: bytes, *, mark: bool) -> bytes:
    """A file's content: the code and its sum."""
    return body + (MARK if mark else b"") + hashlib.sha256(body).digest()


def is_trusted_file(found: os.stat_result) -> bool:
    """Whether nobody but the user and root can have written a file."""
    return (
        stat.S_ISREG(found.st_mode)
        and found.st_uid in (os.geteuid(), 0)
        and not found.st_mode & _OTHERS_WRITE
        and found.st_size <= MOST_BYTES
    )


def why_not_folder(found: os.stat_result) -> str:
    """Why a folder cannot hold compiled code; empty where it can."""
    if not stat.S_ISDIR(found.st_mode):
        return "it is a symbolic link" if stat.S_ISLNK(found.st_mode) else "it is no folder"
    if found.st_uid != os.geteuid():
        return f"it belongs to user {found.st_uid}"
    if found.st_mode & _OTHERS_WRITE:
        return "other users can write to it"
    return ""


def open_folder(path: Path) -> Folder | str:
    """Open a folder, made where it is not there, and close it to other users; or why it cannot be used."""
    try:
        with suppress(FileExistsError):  # an existing folder is checked below
            path.mkdir(mode=_PRIVATE, parents=True, exist_ok=True)
        reason = why_not_folder(path.lstat())
        if reason:
            return reason
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        return f"it cannot be opened ({error.strerror})"
    try:
        reason = why_not_folder(os.fstat(descriptor))  # checks the opened folder: another may have taken its place
        if not reason:
            os.fchmod(descriptor, _PRIVATE)
            with tempfile.TemporaryFile(dir=path):
                return Folder(path, descriptor)
    except OSError as error:
        reason = f"it cannot be written to ({error.strerror})"
    os.close(descriptor)
    return reason


@cache
def folder_at(path: Path) -> Folder | None:
    """The folder there, opened once; None where it cannot be trusted."""
    found = open_folder(path)
    return found if isinstance(found, Folder) else None


@cache
def compiled_folder() -> Path:
    """The user's folder of compiled code, or a private one of this process where that cannot be trusted; warns then."""
    try:
        path = cache_folder() / "compiled"
        found = open_folder(path)
    except RuntimeError as error:  # no home folder
        path, found = Path("compiled"), str(error)
    if isinstance(found, Folder):
        return path
    private = Path(tempfile.mkdtemp(prefix="convoy-compiled-"))
    atexit.register(remove_private, private, os.getpid())
    warn_user(
        f"compiled code is not kept in {path}: {found}. This process compiles into a folder of its own, which takes longer. "
        "Make the folder yours alone (chmod 700), or name another cache folder in XDG_CACHE_HOME."
    )
    return private


def remove_private(private: Path, process: int) -> None:
    """Remove the private cache folder of a process when it exits."""
    if os.getpid() == process:  # a forked child leaves it to its parent
        shutil.rmtree(private, ignore_errors=True)
