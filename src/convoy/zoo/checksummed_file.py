"""Tensors and plain values in one safetensors file, with a SHA-256 over all of them. Nothing in such a file is run.

The values stand in the file's metadata, as JSON in which a tensor is its name:

    format   name and version of the format
    state    the values
    sha256   of `state`, and of each tensor's name, dtype, shape and bytes, in the order of names
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, cast

import safetensors
import safetensors.torch
import torch

from convoy.errors import InputError
from convoy.narrowing import is_dict, is_mapping, is_sequence
from convoy.typed_torch import save_safetensors
from convoy.untrusted import escape_controls, open_file, parse_json, read_bytes
from convoy.whole_file import whole_file

MOST_HEADER_BYTES: Final = 32 << 20
"""Of a file's names, shapes and plain values together: enough for 200,000 tensors."""

CHECKPOINT_FORMAT: Final = "convoy checkpoint 2"
"""Format of the checkpoints of a training. Those of the first format, which torch.save wrote, held no sum."""

_ZIP: Final = b"PK\x03\x04"


def write_checksummed(path: Path, form: str, state: Mapping[str, Any], argument: str) -> None:
    """Write a file; one that is there is replaced only when the new one is whole.

    Args:
        path: the file.
        form: a word for the format and its version.
        state: dicts, lists, tuples, tensors, strings, numbers, booleans and None.
        argument: what to call the file in errors.

    Raises:
        InputError: the path is that of a folder, device, pipe or socket, or its folder does not exist.
        OSError, RuntimeError, ValueError, KeyError: it cannot be written, or `state` holds something else.
    """
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(_encoded(state, "", tensors), allow_nan=False)
    metadata = {"format": form, "state": text, "sha256": _sum(text, tensors)}
    try:
        with whole_file(path, argument) as temporary:
            save_safetensors(tensors, temporary, metadata)
    except safetensors.SafetensorError as error:
        raise OSError(str(error)) from error


def read_checksummed(path: Path, form: str, argument: str, *, most_bytes: int) -> Any:
    """Read a file that `write_checksummed` wrote; tensors are in host memory.

    Args:
        path: the file.
        form: its format.
        argument: what to call it in errors.
        most_bytes: files that are larger are refused before they are read.

    Raises:
        InputError: no file of this format, or one that is damaged.
    """
    data = read_bytes(path, most_bytes, argument)
    try:
        metadata = _metadata(data, argument)
        if metadata.get("format") != form:
            raise InputError(argument, str(path), f"a file of the format {form!r}", _other_format(data, metadata))
        tensors = safetensors.torch.load(data)
        del data
        text = metadata.get("state", "")
        if _sum(text, tensors) != metadata.get("sha256"):
            raise ValueError("its contents do not match their SHA-256")
        return _decoded(parse_json(text, argument), tensors)
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, safetensors.SafetensorError) as error:
        if isinstance(error, InputError) and error.value == str(path):
            raise
        reason = escape_controls(" ".join(str(error).split())[:200] or type(error).__name__)
        raise InputError(argument, str(path), "a file that is whole", f"It cannot be read: {reason}") from error


def read_metadata(path: Path, argument: str) -> dict[str, str]:
    """The metadata of any safetensors file, text by word; empty where it has none.

    Raises:
        OSError, RuntimeError, ValueError: no regular file, or no such file.
    """
    return _metadata(_header(path, argument, 1 << 62), argument)


def read_values(path: Path, argument: str, *, most_bytes: int) -> Any:
    """The plain values of a file, without its tensors (None in their places) and without a look at its sum.

    Raises:
        OSError, RuntimeError, ValueError, KeyError, TypeError: it cannot be read.
    """
    metadata = _metadata(_header(path, argument, most_bytes), argument)
    return _decoded(parse_json(metadata["state"], argument), None)


def _header(path: Path, argument: str, most_bytes: int) -> bytes:
    """The length of the header and the header itself."""
    with open_file(path, most_bytes, argument) as file:
        head = file.read(8)
        return head + file.read(min(int.from_bytes(head, "little"), MOST_HEADER_BYTES))


def _metadata(data: bytes, argument: str) -> dict[str, str]:
    if data[:4] == _ZIP:
        return {}
    length = int.from_bytes(data[:8], "little")
    if length > min(MOST_HEADER_BYTES, len(data) - 8):
        raise ValueError("its header is longer than a safetensors file's")
    header = parse_json(data[8 : 8 + length], argument)
    found: Any = header.get("__metadata__") if is_dict(header) else None
    return found if is_dict(found) and all(isinstance(word, str) for word in found.values()) else {}


def _other_format(data: bytes, metadata: Mapping[str, str]) -> str:
    if data[:4] == _ZIP:
        return "torch.save wrote it, which keeps no sum of the contents. Start anew, with another file."
    return f"It says {metadata['format'][:100]!r}." if "format" in metadata else ""


def _sum(text: str, tensors: Mapping[str, torch.Tensor]) -> str:
    digest = hashlib.sha256(text.encode(errors="surrogatepass"))
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(cast("Any", tensor.reshape(-1).view(torch.uint8).numpy()))
    return digest.hexdigest()


def _encoded(value: Any, where: str, tensors: dict[str, torch.Tensor]) -> Any:
    """JSON of a value; its tensors are put beside it, each with memory of its own."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.Tensor):
        name = where
        while name in tensors:
            name += "+"
        own = value.detach().cpu().contiguous()
        shared = any(own.untyped_storage().data_ptr() == t.untyped_storage().data_ptr() for t in tensors.values())
        tensors[name] = own.clone() if shared else own
        return {"tensor": name}
    if is_mapping(value):
        return {"dict": [[key, _encoded(each, f"{where}/{key}".lstrip("/"), tensors)] for key, each in value.items()]}
    if is_sequence(value):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_encoded(each, f"{where}/{index}", tensors) for index, each in enumerate(value)]}
    raise ValueError(f"{where} is a {type(value).__name__}, which such a file cannot hold")


def _decoded(value: Any, tensors: Mapping[str, torch.Tensor] | None) -> Any:
    if not is_dict(value):
        if isinstance(value, list):
            raise ValueError("its values are malformed")
        return value
    ((kind, held),) = value.items()
    if kind == "tensor":
        return None if tensors is None else tensors[held]
    if kind == "dict":
        return {key: _decoded(each, tensors) for key, each in held}
    if kind in ("list", "tuple"):
        return (list if kind == "list" else tuple)(_decoded(each, tensors) for each in held)
    raise ValueError("its values are malformed")
