"""The zip container of a .pt2 file, and of the sample inputs inside it: entries stored as they are, as torch writes them."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator, Mapping
from typing import Final

from convoy.zoo.pt2.refusal import RefusedError, shown

MOST_ENTRIES: Final = 20_000
"""A net of 1,000 layers has a few thousand weights; each is an entry."""


class Archive(Mapping[str, bytes]):
    """The entries of a zip file by their names below its one folder; each is read when it is asked for.

    torch finds entries whatever the case of their letters, and reads compressed ones; this reader takes neither two names
    that differ in case alone nor compressed entries, so that what is checked is what there is.

    Args:
        data: the whole file.

    Raises:
        RefusedError: it is no zip file, or not one as torch writes them.
    """

    def __init__(self, data: bytes) -> None:
        try:
            self._file = zipfile.ZipFile(io.BytesIO(data))
            entries = self._file.infolist()
        except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, OverflowError) as error:
            raise RefusedError(f"It is no zip archive: {shown(str(error))}.", is_code=False) from error
        if len(entries) > MOST_ENTRIES:
            raise RefusedError(f"It has {len(entries)} entries, more than {MOST_ENTRIES}.", is_code=False)
        self._entries = {_inner_name(entry.filename): entry for entry in entries}
        folded = {name.casefold() for name in self._entries}
        if len(folded) != len(entries) or len({entry.filename.partition("/")[0] for entry in entries}) > 1:
            raise RefusedError("Its entries have names that differ in case alone, or stand in several folders.")
        for name, entry in self._entries.items():
            if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
                raise RefusedError(f"Its entry {shown(name)} is compressed, which torch.export.save never does.")
            if entry.flag_bits & 0x1:
                raise RefusedError(f"Its entry {shown(name)} is encrypted.", is_code=False)
        if sum(entry.file_size for entry in entries) > len(data):
            raise RefusedError("Its entries overlap.", is_code=False)

    def __getitem__(self, name: str) -> bytes:
        try:
            return self._file.read(self._entries[name])
        except (zipfile.BadZipFile, OSError, ValueError, EOFError, NotImplementedError) as error:
            raise RefusedError(
                f"Its entry {shown(name)} cannot be read: {shown(str(error))}.", is_code=False
            ) from error

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def size(self, name: str) -> int:
        """Bytes of an entry."""
        return self._entries[name].file_size


def _inner_name(name: str) -> str:
    """An entry's name below the first folder, which torch names after the file: a user's words, in any script."""
    folder, slash, inner = name.partition("/")
    if not (folder and slash and inner.isascii() and inner and name.isprintable()) or ".." in name.split("/"):
        raise RefusedError(f"It has an entry named {shown(name)}.")
    return inner


def write_archive(entries: Mapping[str, bytes]) -> io.BytesIO:
    """A zip file of these entries below the folder `program`, as torch reads them."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as file:
        for name, data in entries.items():
            file.writestr(f"program/{name}", data)
    stream.seek(0)
    return stream
