"""The first 100 bytes of a SQLite file (https://sqlite.org/fileformat2.html, section 1.3), read without opening the database."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

MAGIC: Final = b"SQLite format 3\0"
HEADER_BYTES: Final = 100


@dataclass(frozen=True, slots=True)
class SqliteHeader:
    """The fields of the header that decide whether Convoy may open the file."""

    schema_version: int
    application_id: int


def read_header(path: Path) -> SqliteHeader | str:
    """The header of a file, or the reason why SQLite cannot have written it."""
    with path.open("rb") as file:
        head = file.read(HEADER_BYTES)
    if len(head) < HEADER_BYTES or head[:16] != MAGIC:
        return "it does not begin as a SQLite database does"
    page_bytes = int.from_bytes(head[16:18], "big")
    page_size_is_valid = page_bytes == 1 or (512 <= page_bytes <= 32768 and page_bytes & (page_bytes - 1) == 0)
    formats, fractions = head[18:20], tuple(head[21:24])
    schema_format, encoding = struct.unpack(">I", head[44:48])[0], struct.unpack(">I", head[56:60])[0]
    # Schema format and encoding are 0 in a database that never had a table.
    if (
        not page_size_is_valid
        or set(formats) - {1, 2}
        or fractions != (64, 32, 32)
        or schema_format > 4
        or encoding > 3
    ):
        return "its header is damaged"
    return SqliteHeader(struct.unpack(">I", head[60:64])[0], struct.unpack(">I", head[68:72])[0])
