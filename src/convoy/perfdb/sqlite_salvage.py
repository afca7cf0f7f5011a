"""Read the records of a SQLite file page by page, without its tree, its schema or SQLite itself.

For salvage: one damaged page makes SQLite give up a whole table, although every other page still holds its rows. Each
table leaf page names its own cells, so rows can be had from any page that is whole; the seal of every row (`record`) then
says whether what was read is what was written. Layouts are those of SQLite's own page "Database File Format"
(https://sqlite.org/fileformat2.html), whose section numbers the comments give.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from convoy.untrusted import read_at_most

Cell = int | float | str | bytes | None

MAGIC: Final = b"SQLite format 3\0"
HEADER_BYTES: Final = 100
PAGE_BYTES: Final = 4096
"""What Convoy creates its files with, and what is assumed where the header is lost."""

MOST_BYTES: Final = 256 << 20
"""Of a damaged file and of its log: what lies behind is not looked at. All results of a GPU that ship take 12 MB as text."""

_TABLE_LEAF: Final = 0x0D
_WAL_HEADER_BYTES: Final = 32
_FRAME_HEADER_BYTES: Final = 24
_LONGEST_PAYLOAD: Final = 1 << 25
"""Far above any row that is ever written; a longer one is a damaged length."""


@dataclass(frozen=True, slots=True)
class Header:
    """What the first 100 bytes say (section 1.3)."""

    page_bytes: int
    schema_version: int
    application_id: int


def read_header(path: Path) -> Header | str:
    """The header of a file, or the reason why it is not the header of a database that SQLite could have written."""
    with path.open("rb") as file:
        head = file.read(HEADER_BYTES)
    if len(head) < HEADER_BYTES or head[:16] != MAGIC:
        return "it does not begin as a SQLite database does"
    page_bytes = _page_bytes(head)
    formats, fractions = head[18:20], tuple(head[21:24])
    schema_format, encoding = struct.unpack(">I", head[44:48])[0], struct.unpack(">I", head[56:60])[0]
    # Schema format and encoding are 0 in a database that never had a table.
    if not page_bytes or set(formats) - {1, 2} or fractions != (64, 32, 32) or schema_format > 4 or encoding > 3:
        return "its header is damaged"
    return Header(page_bytes, struct.unpack(">I", head[60:64])[0], struct.unpack(">I", head[68:72])[0])


def _page_bytes(head: bytes) -> int:
    size = int.from_bytes(head[16:18], "big")
    size = 65536 if size == 1 else size
    return size if 512 <= size <= 65536 and size & (size - 1) == 0 else 0


def read_records(path: Path) -> Iterator[tuple[Cell, ...]]:
    """Every record of every table leaf page that can be decoded, those of the schema table among them, unordered.

    Committed pages of the write-ahead log stand in for the pages that they replace. What cannot be decoded is left out:
    nothing here raises for any contents of the file.

    Raises:
        OSError: if the file cannot be read.
    """
    pages = _read_pages(path)
    for number, page in pages.items():
        start = HEADER_BYTES if number == 1 else 0
        if len(page) > start + 8 and page[start] == _TABLE_LEAF:
            yield from _leaf_records(page, start, pages)


def _read_pages(path: Path) -> dict[int, bytes]:
    data = _read_start(path)
    size = _page_bytes(data[:HEADER_BYTES]) or PAGE_BYTES
    pages = {at // size + 1: data[at : at + size].ljust(size, b"\0") for at in range(0, len(data), size)}
    log = path.with_name(path.name + "-wal")
    if log.is_file():
        pages |= _log_pages(_read_start(log), size)
    return pages


def _read_start(path: Path) -> bytes:
    """A file's content as far as it is looked at."""
    with path.open("rb") as file:
        return read_at_most(file, MOST_BYTES)


def _log_pages(log: bytes, size: int) -> dict[int, bytes]:
    """Pages of all committed transactions of a write-ahead log (section 4.1): frames of its own salt, up to the last commit."""
    committed: dict[int, bytes] = {}
    open_transaction: dict[int, bytes] = {}
    salt = log[16:24]
    for at in range(_WAL_HEADER_BYTES, len(log) - _FRAME_HEADER_BYTES - size + 1, _FRAME_HEADER_BYTES + size):
        number, pages_after_commit = struct.unpack(">II", log[at : at + 8])
        if log[at + 8 : at + 16] != salt:
            break
        body = at + _FRAME_HEADER_BYTES
        open_transaction[number] = log[body : body + size]
        if pages_after_commit:
            committed |= open_transaction
            open_transaction.clear()
    return committed


def _leaf_records(page: bytes, start: int, pages: Mapping[int, bytes]) -> Iterator[tuple[Cell, ...]]:
    """Records of the cells that a leaf page names (section 1.6)."""
    count = int.from_bytes(page[start + 3 : start + 5], "big")
    for index in range(min(count, (len(page) - start - 8) // 2)):
        at = start + 8 + 2 * index
        try:
            yield _record(_payload(page, int.from_bytes(page[at : at + 2], "big"), pages))
        except (IndexError, ValueError, KeyError, struct.error):  # a damaged cell: its neighbours may be whole
            continue


def _payload(page: bytes, at: int, pages: Mapping[int, bytes]) -> bytes:
    """A cell's payload with its overflow pages (sections 1.6 and 1.7), for pages without reserved bytes."""
    length, at = _varint(page, at)
    _, at = _varint(page, at)
    usable = len(page)
    if length > _LONGEST_PAYLOAD:
        raise ValueError("payload length")
    if length <= usable - 35:
        return page[at : at + length]
    least = (usable - 12) * 32 // 255 - 23
    local = least + (length - least) % (usable - 4)
    local = local if local <= usable - 35 else least
    parts = [page[at : at + local]]
    follow, missing = int.from_bytes(page[at + local : at + local + 4], "big"), length - local
    while missing > 0:
        body = pages[follow]
        parts.append(body[4 : 4 + min(missing, usable - 4)])
        follow, missing = int.from_bytes(body[:4], "big"), missing - (usable - 4)
    return b"".join(parts)


_INTEGER_BYTES: Final = {1: 1, 2: 2, 3: 3, 4: 4, 5: 6, 6: 8}


def _record(payload: bytes) -> tuple[Cell, ...]:
    """Decode a record (section 2.1)."""
    header_length, at = _varint(payload, 0)
    body, cells = header_length, list[Cell]()
    while at < header_length:
        kind, at = _varint(payload, at)
        width = _INTEGER_BYTES.get(kind, 0) if kind < 7 else 8 if kind == 7 else max(0, (kind - 12) // 2)
        raw = payload[body : body + width]
        if len(raw) < width:
            raise ValueError("record is cut short")
        cells.append(_cell(kind, raw))
        body += width
    return tuple(cells)


def _cell(kind: int, raw: bytes) -> Cell:
    if kind == 0:
        return None
    if kind in _INTEGER_BYTES:
        return int.from_bytes(raw, "big", signed=True)
    if kind == 7:
        return struct.unpack(">d", raw)[0]
    if kind in (8, 9):
        return kind - 8
    if kind < 12:
        raise ValueError("reserved serial type")
    return raw.decode() if kind % 2 else raw


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A variable-length integer and the offset after it: seven bits a byte, all eight of a ninth."""
    value = 0
    for index in range(8):
        byte = data[at + index]
        value = value << 7 | byte & 0x7F
        if byte < 0x80:
            return value, at + index + 1
    return value << 8 | data[at + 8], at + 9
