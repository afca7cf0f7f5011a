"""Data sets, images and weights from elsewhere: no file makes a reader wait, take much memory or run anything."""

from __future__ import annotations

import io
import os
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from convoy.errors import InputError
from convoy.zoo import Preprocessing, load_dataset, load_images, load_model
from convoy.zoo.npz import read_npz
from convoy.zoo.weights import read

SMALL = Preprocessing(8)

READERS: dict[str, Callable[[Path], object]] = {
    ".png": lambda path: load_images([path], size=8),
    ".npz": lambda path: load_images([path], size=8),
    ".safetensors": lambda path: load_images([path], size=8),
    "data.npz": lambda path: load_dataset(str(path), preprocessing=SMALL),
    "weights.safetensors": read,
    ".pt2": lambda path: load_model(str(path)),
}


@pytest.mark.parametrize("suffix", READERS)
@pytest.mark.parametrize("kind", ["pipe", "device", "nothing", "empty"])
def test_what_is_no_file_of_this_kind_is_refused_at_once(tmp_path: Path, suffix: str, kind: str) -> None:
    path = tmp_path / f"x{suffix}"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "empty":
        path.write_bytes(b"")
    with pytest.raises(InputError) as caught:
        READERS[suffix](path)
    assert path.name in str(caught.value)


def png(width: int, height: int) -> bytes:
    """A PNG of black pixels, however large, in a few bytes."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    pack = zlib.compressobj(9)
    row = bytes(1 + (width + 7) // 8)
    pixels = b"".join([*(pack.compress(row) for _ in range(height)), pack.flush()])
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


@pytest.mark.parametrize(("width", "height"), [(13000, 13000), (30000, 1), (1, 30000)])
def test_images_that_would_be_huge(tmp_path: Path, width: int, height: int) -> None:
    path = tmp_path / "bomb.png"
    path.write_bytes(png(width, height))
    assert path.stat().st_size < 100_000
    with pytest.raises(InputError, match="at most 64 megapixels"):
        load_images([path], size=224)


def test_an_image_that_another_program_would_read_is_refused(tmp_path: Path) -> None:
    """Pillow gives EPS to Ghostscript, which is a programming language."""
    path = tmp_path / "a.png"
    path.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n(x) run\n%%EOF\n")
    with pytest.raises(InputError, match="an image that Pillow can read"):
        load_images([path], size=8)


def test_names_that_are_not_utf_8(tmp_path: Path) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.png"))
    Image.new("RGB", (8, 8), (255, 0, 0)).save(path.rename(path) if path.exists() else path, "PNG")
    assert torch.equal(load_images([path], size=8), load_images([tmp_path], size=8))
    path.write_bytes(b"damaged")
    with pytest.raises(InputError) as caught:
        load_images([tmp_path], size=8)
    str(caught.value).encode()  # the message can be printed


def npz(entries: dict[str, bytes], compression: int = zipfile.ZIP_DEFLATED) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", compression) as file:
        for name, data in entries.items():
            file.writestr(name, data)
    return stream.getvalue()


def npy(header: str, data: bytes = b"") -> bytes:
    text = header.encode()
    return b"\x93NUMPY\1\0" + struct.pack("<H", len(text)) + text + data


GOOD = "{'descr': '|u1', 'fortran_order': False, 'shape': (1, 3, 8, 8), }"


def test_what_numpy_writes_is_read(tmp_path: Path) -> None:
    images = np.arange(2 * 3 * 4 * 5, dtype=np.uint8).reshape(2, 3, 4, 5)
    arrays = {"images": images, "labels": np.array([3, 1]), "offsets": np.asfortranarray(np.ones((2, 3), np.int16))}
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "a.npz", **arrays, other=np.array(["text"]))
        found = read_npz(tmp_path / "a.npz", ["images", "labels", "offsets", "absent"])
        assert set(found) == set(arrays)
        for name, array in arrays.items():
            assert np.array_equal(found[name], array)
            assert found[name].dtype == array.dtype


BAD = {
    "objects": npz({"images.npy": npy(GOOD.replace("|u1", "|O"), bytes(192))}),
    "code in its header": npz({"images.npy": npy(GOOD.replace("False", "exec('')"), bytes(192))}),
    "a deep header": npz({"images.npy": npy("(" * 9000)}),
    "a number of many digits": npz({"images.npy": npy(GOOD.replace("(1,", f"({'9' * 400},"))}),
    "a shape without data": npz({"images.npy": npy(GOOD.replace("(1,", "(99999999999,"))}),
    "too little data": npz({"images.npy": npy(GOOD, bytes(191))}),
    "too much data": npz({"images.npy": npy(GOOD, bytes(193))}),
    "another compression": npz({"images.npy": npy(GOOD, bytes(192))}, zipfile.ZIP_LZMA),
    "damaged compression": npz({"images.npy": npy(GOOD, os.urandom(192))}).replace(b"NUMPY", b"\xff\xff\xff\xff\xff"),
    "too many entries": npz({**{f"{i}": b"" for i in range(10_001)}, "images.npy": npy(GOOD, bytes(192))}),
    "no array": npz({"images.npy": b"words"}),
}


@pytest.mark.parametrize("name", BAD)
def test_damaged_arrays(tmp_path: Path, name: str) -> None:
    (tmp_path / "a.npz").write_bytes(BAD[name])
    with pytest.raises(InputError, match=r"a whole \.npz file"):
        load_images([tmp_path / "a.npz"], size=8)


def test_arrays_that_would_be_huge(tmp_path: Path) -> None:
    path = tmp_path / "bomb.npz"
    header = npy("{'descr': '|u1', 'fortran_order': False, 'shape': (4294967296,), }")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("images.npy", header + bytes(1 << 20))
    data = path.read_bytes()
    size = struct.pack("<I", len(header) + (1 << 20))
    path.write_bytes(data.replace(size, struct.pack("<I", 0xF0000000)))  # what its directory says
    with pytest.raises(InputError, match="would become more than 20 times"):
        load_images([path], size=8)


def test_labels_beyond_all_bounds(tmp_path: Path) -> None:
    for label in (2**63, 2**62, 2**24 + 1):
        labels = np.array([label], np.uint64)
        np.savez(tmp_path / "a.npz", images=np.zeros((1, 3, 8, 8), np.uint8), labels=labels)
        with pytest.raises(InputError, match="labels"):
            load_dataset(str(tmp_path / "a.npz"), "all", preprocessing=SMALL)
