"""Arrays of an .npz file, read as if an enemy had written it: plain numbers, no more bytes than the file can mean."""

from __future__ import annotations

import math
import re
import struct
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Final

import numpy as np

from convoy.errors import InputError
from convoy.untrusted import escape_controls, open_file

MOST_BYTES: Final = 64 << 30
"""Of a file of arrays: a data set of a million JPEG files."""

FREE_BYTES: Final = 64 << 20
"""Most bytes of a file after unpacking."""

MOST_RATIO: Final = 20
"""And how many times its size beyond that: pixels of photographs shrink to a half, drawings to a tenth."""

MOST_ENTRIES: Final = 10_000
_LONGEST_HEADER: Final = 10_000
_HEADER: Final = re.compile(
    rb"\{'descr': '([<|>][iufb][1248])', 'fortran_order': (True|False), 'shape': \(((?:\d{1,18}, ?)*\d{0,18})\), ?\}\s*"
)


def read_npz(path: Path, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Those of `names` that an .npz file holds.

    Raises:
        InputError: naming `input` and the file: it is no regular file, is damaged, or would take far more memory than its size.
    """
    with open_file(path, MOST_BYTES, "input") as file:
        try:
            with zipfile.ZipFile(file) as archive:
                if len(archive.infolist()) > MOST_ENTRIES:
                    raise ValueError(f"it has more than {MOST_ENTRIES} entries")
                there = {entry.filename: entry for entry in archive.infolist()}
                wanted = {name: there[f"{name}.npy"] for name in names if f"{name}.npy" in there}
                size = file.seek(0, 2)
                if sum(entry.file_size for entry in wanted.values()) > FREE_BYTES + MOST_RATIO * size:
                    raise ValueError(f"its {size} bytes would become more than {MOST_RATIO} times as many")
                return {name: _array(archive, entry) for name, entry in wanted.items()}
        except (
            zipfile.BadZipFile,
            zlib.error,
            struct.error,
            OSError,
            ValueError,
            EOFError,
            RuntimeError,  # an encrypted entry
            OverflowError,
            MemoryError,
            KeyError,
        ) as error:
            said = escape_controls(f"Reading it failed: {error}")[:300]
            raise InputError("input", str(path), "a whole .npz file of numbers", said) from error


def _array(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> np.ndarray:
    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"its compression {entry.compress_type} is none that NumPy writes")
    with archive.open(entry) as data:
        kind, shape, fortran = _header(data)
        left = math.prod(shape) * kind.itemsize
        if left > entry.file_size:
            raise ValueError(f"an array of {left} bytes in an entry of {entry.file_size}")
        content = data.read(left)
        if len(content) != left or data.read(1):
            raise ValueError(f"an array that has not the {left} bytes of its shape")
    return np.frombuffer(content, kind).reshape(shape, order="F" if fortran else "C")


def _header(data: IO[bytes]) -> tuple[np.dtype, tuple[int, ...], bool]:
    """Type, shape and order, by NumPy's format; its own reader evaluates the header as Python's literals."""
    magic = data.read(8)
    if magic[:6] != b"\x93NUMPY" or magic[6:] not in (b"\1\0", b"\2\0", b"\3\0"):
        raise ValueError("an entry that is no array")
    length = int.from_bytes(data.read(2 if magic[6] == 1 else 4), "little")
    text = data.read(min(length, _LONGEST_HEADER))
    found = _HEADER.fullmatch(text) if len(text) == length else None
    if found is None:
        raise ValueError("an array that is not of plain numbers")
    shape = tuple(int(side) for side in found[3].replace(b" ", b"").split(b",") if side)
    if len(shape) > 8:
        raise ValueError(f"an array of {len(shape)} dimensions")
    return np.dtype(found[1].decode()), shape, found[2] == b"True"
