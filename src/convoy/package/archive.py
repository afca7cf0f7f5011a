"""The archive of a package: a zip file of stored members, each aligned, written completely or not at all.

The profile is narrow, so that a reader of a few lines can check all of it: no compression, no zip64, no comments, no gaps,
members in the order of the directory (docs/reference/package.md).
"""

from __future__ import annotations

import mmap
import os
import re
import struct
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final

from convoy.errors import InputError, PackageError
from convoy.untrusted import open_file
from convoy.whole_file import replaceable_file, whole_file

ALIGNMENT: Final = 64
"""Bytes: the data of every member begins at a multiple, so that tensors can be used where they lie."""

MOST_BYTES: Final = (1 << 32) - 2
"""Of a package: what offsets of a zip file without zip64 reach."""

MOST_MEMBERS: Final = 4096

_LOCAL: Final = struct.Struct("<IHHHHHIIIHH")
_ENTRY: Final = struct.Struct("<IHHHHHHIIIHHHHHII")
_END: Final = struct.Struct("<IHHHHIIH")
_LOCAL_MARK, _ENTRY_MARK, _END_MARK = 0x04034B50, 0x02014B50, 0x06054B50
_VERSION: Final = 10
_DATE: Final = (1 << 5) | 1
"""1980-01-01, the first day that zip files know: packages of the same content have the same bytes."""

_PADDING: Final = 0xD935
"""Id of the extra field that pads to the alignment, as Android's zipalign writes it: the alignment, then zeros."""

_NAME: Final = re.compile(r"[a-z0-9_]+(?:[./][a-z0-9_]+){0,8}")
_AGAIN: Final = "Export the package again."

Buffer = bytes | memoryview
Content = Sequence[Buffer]
"""The bytes of a member, in parts."""


@dataclass(frozen=True, slots=True)
class Member:
    """Where a member's data lies.

    Attributes:
        offset: of the first byte, in the file.
        size_bytes: number of bytes.
        crc: CRC-32 of the data, as the archive states it.
    """

    offset: int
    size_bytes: int
    crc: int


@dataclass(frozen=True, eq=False)
class PackageArchive:
    """An opened package. The file is mapped into memory; pages are read when they are used.

    Attributes:
        path: the file, for messages.
        members: by name, in order.
        buffer: the whole file. Writes to it stay in this process.
    """

    path: str
    members: dict[str, Member]
    buffer: memoryview = field(repr=False)

    def view(self, name: str) -> memoryview:
        """A member's data, without a copy; raises PackageError if there is no such member."""
        if name not in self.members:
            raise PackageError("package", self.path, f"a member {name}", _AGAIN)
        member = self.members[name]
        return self.buffer[member.offset : member.offset + member.size_bytes]

    def has_crc(self, name: str) -> bool:
        """Whether a member's data has the CRC-32 that the archive states."""
        return zlib.crc32(self.view(name)) == self.members[name].crc


def check_path(path: Path) -> None:
    """Refuse a path that is a folder, or whose folder is not there.

    Raises:
        InputError: naming it.
    """
    replaceable_file(path, "output")


def write_archive(path: Path, members: Sequence[tuple[str, Content]]) -> None:
    """Write a package: an existing file is replaced only when the new one is complete and on the disk.

    Args:
        path: the file.
        members: names and contents, in order.

    Raises:
        InputError: the path cannot be written, the disk is full, or the package would be too large.
    """
    try:
        with whole_file(path, "output") as temporary, temporary.open("xb") as file:
            for part in _parts(path, members):
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        _sync_folder(path.parent)
    except OSError as error:
        said = os.strerror(error.errno) if error.errno else str(error)
        raise InputError("output", str(path), "a path that can be written", f"{said}. Nothing was written.") from error


def _sync_folder(folder: Path) -> None:
    """Put the new name on the disk too; some file systems cannot, and need not."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _parts(path: Path, members: Sequence[tuple[str, Content]]) -> list[Buffer]:
    """The file's bytes, in order."""
    found: list[Buffer] = []
    entries: list[bytes] = []
    at = 0
    for name, content in members:
        assert _NAME.fullmatch(name), name
        crc = 0
        for part in content:
            crc = zlib.crc32(part, crc)
        size, text = sum(len(part) for part in content), name.encode()
        if at + size > MOST_BYTES - (1 << 20):
            raise InputError("output", str(path), "a package of at most 4 GiB", "Its weights are larger.")
        padding = -(at + _LOCAL.size + len(text) + 6) % ALIGNMENT
        extra = struct.pack("<HHH", _PADDING, 2 + padding, ALIGNMENT) + bytes(padding)
        fields = _VERSION, 0, 0, 0, _DATE, crc, size, size, len(text)
        found += [_LOCAL.pack(_LOCAL_MARK, *fields, len(extra)) + text + extra, *content]
        entries.append(_ENTRY.pack(_ENTRY_MARK, _VERSION, *fields, 0, 0, 0, 0, 0, at) + text)
        at += _LOCAL.size + len(text) + len(extra) + size
    directory = b"".join(entries)
    found += [directory, _END.pack(_END_MARK, 0, 0, len(entries), len(entries), len(directory), at, 0)]
    return found


def read_archive(path: str | Path, *, own_memory: bool = False) -> PackageArchive:
    """Open a package and check its structure. Data is not read yet.

    Args:
        path: the file.
        own_memory: copy the file into memory of this process, so that nobody can change it any more.

    Raises:
        PackageError: no regular file, too large, or no archive of this profile.
    """
    with open_file(path, MOST_BYTES, "package", PackageError) as file:
        size = os.fstat(file.fileno()).st_size
        if size < _END.size:
            raise _damage(path, "it is shorter than any package")
        try:  # private and writable: torch warns of tensors in memory that cannot be written to
            mapped = _copied(file, size) if own_memory else mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise PackageError("package", str(path), "a file that can be mapped", str(error)) from error
    buffer = memoryview(mapped)
    return PackageArchive(str(path), _members(path, buffer), buffer)


def _copied(file: IO[bytes], size: int) -> mmap.mmap:
    """The content of a file, in memory of this process that begins at a page as a mapped file does."""
    memory = mmap.mmap(-1, size)
    at = 0
    with memoryview(memory) as whole:
        while at < size:
            part = file.read(min(size - at, 1 << 24))
            if not part:
                raise OSError("it became shorter while it was read")
            whole[at : at + len(part)] = part
            at += len(part)
    return memory


def _damage(path: str | Path, why: str) -> PackageError:
    return PackageError("package", str(path), "a whole .convoy package", f"Here {why}. {_AGAIN}")


def _members(path: str | Path, buffer: memoryview) -> dict[str, Member]:
    """The members, after every field of the archive was compared with what `write_archive` writes."""
    end = len(buffer) - _END.size
    mark, disk, first_disk, here, count, size, start, comment = _END.unpack_from(buffer, end)
    if mark != _END_MARK or (disk, first_disk, comment) != (0, 0, 0) or here != count:
        raise _damage(path, "the end of the archive is missing")
    if not 1 <= count <= MOST_MEMBERS or start + size != end:
        raise _damage(path, "the archive's directory is not before its end")
    found: dict[str, Member] = {}
    at, next_local = start, 0
    for _ in range(count):
        if at + _ENTRY.size > end:
            raise _damage(path, "the archive's directory is cut")
        mark, version, *fields = _ENTRY.unpack_from(buffer, at)
        common, rest, local = tuple(fields[:9]), fields[9:14], fields[14]
        length = common[8]
        name = bytes(buffer[at + _ENTRY.size : at + _ENTRY.size + length]).decode("ascii", "replace")
        at += _ENTRY.size + length
        if mark != _ENTRY_MARK or version != _VERSION or any(rest) or local != next_local:
            raise _damage(path, "an entry of the archive's directory is wrong")
        if not _NAME.fullmatch(name) or name in found:
            raise _damage(path, "a member's name is wrong, or stands twice")
        found[name] = _member(path, buffer[:start], local, common, name)
        next_local = found[name].offset + found[name].size_bytes
    if at != end or next_local != start:
        raise _damage(path, "there are bytes between the archive's members")
    return found


def _member(path: str | Path, buffer: memoryview, at: int, common: tuple[int, ...], name: str) -> Member:
    """A member, from its local header, which must say what the directory says."""
    if at + _LOCAL.size > len(buffer):
        raise _damage(path, f"member {name} lies outside the file")
    mark, *fields, extra = _LOCAL.unpack_from(buffer, at)
    start = at + _LOCAL.size
    offset = start + common[8] + extra
    version, flags, method, _, _, crc, size, plain_size, length = common
    if mark != _LOCAL_MARK or tuple(fields) != common or bytes(buffer[start : start + length]) != name.encode():
        raise _damage(path, f"the header of member {name} is wrong")
    if (version, flags, method) != (_VERSION, 0, 0) or size != plain_size or offset % ALIGNMENT:
        raise _damage(path, f"member {name} is compressed, encrypted or not aligned")
    if offset + size > len(buffer):
        raise _damage(path, f"member {name} is cut")
    return Member(offset, size, crc)
