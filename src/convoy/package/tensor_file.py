"""Tensors of a package: a safetensors file that is used where it lies, without copies.

The format is that of the safetensors library: eight bytes with the header's length, a header in JSON, the data without gaps. The
header is padded, and tensors of padding stand behind others, so that each tensor begins at a multiple of 64 bytes: MKL's sums
depend on the address of a matrix, and PyTorch's own tensors begin at such multiples too.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from typing import Any, Final, cast

import torch

from convoy.errors import PackageError
from convoy.package.archive import ALIGNMENT, Buffer
from convoy.untrusted import parse_json

MOST_HEADER_BYTES: Final = 16 << 20
MOST_DIMENSIONS: Final = 16
PADDING: Final = "padding."
"""Beginning of the names of tensors that fill gaps; no program names them."""

DTYPES: Final[Mapping[str, torch.dtype]] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Names of dtypes in safetensors files, larger values first."""

_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}


def is_storable(tensor: torch.Tensor) -> bool:
    """Whether a tensor is plain memory of a dtype that the file format has."""
    plain = tensor.layout == torch.strided and tensor.device.type == "cpu" and not tensor.is_mkldnn
    return plain and tensor.dtype in _NAMES and not tensor.is_quantized


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The values of a tensor, row by row; of the tensor's own memory where it is contiguous."""
    flat = tensor.detach().contiguous().reshape(-1)
    return memoryview(cast("Any", flat.view(torch.uint8).numpy())) if flat.numel() else memoryview(b"")


def as_stored(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as a package stores it, so that libraries compute the same bits: contiguous, at a multiple of 64 bytes."""
    if not is_storable(tensor):
        return tensor
    found = tensor.detach().contiguous()
    return found if found.data_ptr() % ALIGNMENT == 0 else found.clone()


def write_tensors(tensors: Mapping[str, torch.Tensor]) -> list[Buffer]:
    """The parts of a file with these tensors: contiguous, on the CPU, of dtypes of `DTYPES`."""

    def order(name: str) -> tuple[bool, int, str]:
        tensor = tensors[name]
        size = tensor.numel() * tensor.element_size()
        return size % ALIGNMENT != 0, -tensor.element_size(), name

    header: dict[str, object] = {}
    parts: list[Buffer] = []
    at = 0
    names = sorted(tensors, key=order)
    for name in names:
        tensor = tensors[name]
        content = tensor_bytes(tensor)
        end = at + len(content)
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}
        parts.append(content)
        at = end
        if (gap := -end % ALIGNMENT) and name != names[-1]:
            header[f"{PADDING}{end}"] = {"dtype": "U8", "shape": [gap], "data_offsets": [end, end + gap]}
            parts.append(bytes(gap))
            at = end + gap
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    return [struct.pack("<Q", len(text)) + text, *parts]


def read_tensors(buffer: memoryview, path: str) -> dict[str, torch.Tensor]:
    """The tensors of a file, in its memory: they keep the memory alive.

    Args:
        buffer: the file, in memory that can be written to.
        path: the package, for errors.

    Raises:
        PackageError: no such file: another header, dtype or shape, or tensors that overlap, leave gaps or lie outside.
    """
    what = f"weights of {path}"
    length = struct.unpack_from("<Q", buffer)[0] if len(buffer) >= 8 else 1 << 62
    if length > min(MOST_HEADER_BYTES, len(buffer) - 8):
        raise PackageError(what, length, "the length of a header in the file")
    header: object = parse_json(bytes(buffer[8 : 8 + length]).rstrip(b" "), what, PackageError)
    if not isinstance(header, dict):
        raise PackageError(what, header, "a JSON object")
    start, expected = 8 + length, 0
    found: dict[str, torch.Tensor] = {}
    for name, entry in cast("dict[str, Any]", header).items():
        dtype, shape, begin, end = _checked(what, name, entry)
        count = math.prod(shape)
        fits = begin == expected and end == begin + count * dtype.itemsize and start + end <= len(buffer)
        if not fits or (start + begin) % dtype.itemsize:
            raise PackageError(what, [begin, end], f"the place of tensor {name}")
        expected = end
        found[name] = (
            torch.frombuffer(buffer, dtype=dtype, count=count, offset=start + begin).view(shape)
            if count
            else torch.empty(shape, dtype=dtype)
        )
    if start + expected != len(buffer):
        raise PackageError(what, len(buffer), f"{start + expected} bytes, which its header tells")
    return found


def _checked(what: str, name: str, entry: object) -> tuple[torch.dtype, tuple[int, ...], int, int]:
    """Dtype, shape and place of a tensor."""
    fields = cast("dict[str, Any]", entry) if isinstance(entry, dict) else {}
    dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise PackageError(what, dtype, f"the dtype of tensor {name}, one of {', '.join(DTYPES)}")
    if not _are_counts(shape) or len(cast("list[int]", shape)) > MOST_DIMENSIONS:
        raise PackageError(what, shape, f"the shape of tensor {name}")
    if not _are_counts(offsets) or len(cast("list[int]", offsets)) != 2 or len(fields) != 3:
        raise PackageError(what, offsets, f"the place of tensor {name}")
    begin, end = cast("list[int]", offsets)
    return DTYPES[dtype], tuple(cast("list[int]", shape)), begin, end


def _are_counts(value: object) -> bool:
    if not isinstance(value, list):
        return False
    items = cast("list[object]", value)
    return all(isinstance(item, int) and not isinstance(item, bool) and 0 <= item < 1 << 40 for item in items)
