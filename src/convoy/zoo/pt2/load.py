"""A checked .pt2 file as a program of torch: the parts together."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from convoy.zoo.pt2.archive import Archive, write_archive
from convoy.zoo.pt2.payloads import read_payloads
from convoy.zoo.pt2.program import DynamicSizes, read_program_json
from convoy.zoo.pt2.refusal import RefusedError, shown
from convoy.zoo.pt2.sample_inputs import read_sample_inputs

_ENTRIES: Final = re.compile(
    r"archive_format|archive_version|byteorder|version|\.data/(?:version|serialization_id)|\.format_version"
    r"|\.storage_alignment|models/model\.json|data/sample_inputs/model\.pt"
    r"|data/weights/(?:weight_\d{1,9}|model_weights_config\.json)"
    r"|data/constants/(?:tensor_\d{1,9}|model_constants_config\.json)|extra/[\w.\-]{1,200}",
    re.ASCII,
)
"""Files that `torch.export.save` writes for a program of tensors and operators; extra files are not read."""


@dataclass(frozen=True, slots=True)
class Pt2Program:
    """A program that torch can load, in which nothing is code.

    Attributes:
        archive: a .pt2 file with the parts that passed the check, in memory.
        example: its example inputs: arguments and keyword arguments; None where the file has none.
        sizes: sizes of its inputs that may vary; in `archive` they are those of the example.
    """

    archive: io.BytesIO
    example: tuple[tuple[Any, ...], dict[str, Any]] | None
    sizes: DynamicSizes


def read_program(data: bytes) -> Pt2Program:
    """Check the bytes of a .pt2 file.

    Raises:
        RefusedError: they hold something that could be code, or are damaged.
    """
    archive = Archive(data)
    for name in archive:
        if _ENTRIES.fullmatch(name) is None:
            raise RefusedError(f"It holds {shown(name)}.")
    _check_format(archive)
    program, sizes = read_program_json(archive["models/model.json"])
    example = read_sample_inputs(archive["data/sample_inputs/model.pt"])
    entries: dict[str, bytes] = {
        "archive_format": b"pt2",
        "archive_version": b"0",
        "byteorder": b"little",
        ".data/version": archive.get(".data/version", b"6"),
        "models/model.json": json_bytes(program),
        "data/sample_inputs/model.pt": _saved(example),
    }
    for folder in ("weights", "constants"):
        entries |= read_payloads(archive, folder)
    return Pt2Program(write_archive(entries), example, sizes)


def json_bytes(value: Mapping[str, Any]) -> bytes:
    """JSON as torch reads it."""
    import json

    return json.dumps(value, allow_nan=False).encode()


def _check_format(archive: Archive) -> None:
    for name, wanted in (("archive_format", b"pt2"), ("archive_version", b"0"), ("byteorder", b"little")):
        if archive.get(name, wanted if name == "byteorder" else b"") != wanted:
            raise RefusedError(f"Its {name} is not {wanted.decode()}: another version of PyTorch wrote it.")
    if not re.fullmatch(rb"\d{1,3}\n?", archive.get(".data/version", b"6")):
        raise RefusedError("Its .data/version is no number.", is_code=False)
    for name in ("models/model.json", "data/sample_inputs/model.pt"):
        if name not in archive:
            raise RefusedError(f"It lacks {name}: an older PyTorch wrote it, or it is no program.")


def _saved(example: object) -> bytes:
    if example is None:
        return b""
    stream = io.BytesIO()
    torch.save(example, stream)
    return stream.getvalue()
