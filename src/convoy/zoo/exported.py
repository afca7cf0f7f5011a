"""A saved torch.export program (.pt2), read as data."""

from __future__ import annotations

import io
import json
import logging
import pickle
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from convoy.errors import InputError

EXPRESSION = re.compile(r"(?:[A-Za-z_]\w*\(|[su]\d+|\d+(?:\.\d+)?|True|False|oo|[\s+\-*/%(),<>=!&|~])*", re.ASCII)
"""What a symbolic size may look like: calls of plain names, symbols, numbers, operators; no attributes, no text."""


def load_program(file: Path, dtype: torch.dtype) -> nn.Module:
    """Load a program as a module in evaluation mode; `example_input_array` holds its example inputs where it has some.

    Args:
        file: as `torch.export.save` wrote it.
        dtype: what its floating-point parameters must have.

    Raises:
        InputError: it is not there, is no such program, holds anything but data, or has another dtype.
    """
    if not file.is_file():
        raise InputError("model", str(file), "a .pt2 file that is there")
    _vet(file)
    log = logging.getLogger("torch.export")
    level = log.level
    log.setLevel(logging.CRITICAL)  # it logs a traceback for what becomes one line here
    try:
        program = torch.export.load(str(file))
    except (RuntimeError, OSError, ValueError, KeyError, TypeError, AttributeError, AssertionError) as error:
        raise _unreadable(file, error) from error
    finally:
        log.setLevel(level)
    other = {p.dtype for p in program.parameters() if p.is_floating_point()} - {dtype}
    if other:
        raise InputError("dtype", str(dtype), f"{other.pop()}, which {file} was exported in")
    module = program.module()
    # An exported module refuses .eval() and .train(): its mode is what it was exported in. Those of every module, which set
    # flags that its graph does not read, let it go where any module goes.
    for name in ("eval", "train"):
        module.__dict__.pop(name, None)
    module.eval()
    if program.example_inputs is not None:
        args, kwargs = program.example_inputs
        if not kwargs:
            module.example_input_array = tuple(args)
    return module


def _vet(file: Path) -> None:
    """Refuse archives in which torch would find code: pickles beyond tensors, libraries, expressions beyond arithmetic.

    `torch.export.load` falls back to the unrestricted unpickler, and reads symbolic sizes by evaluating them.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            names = archive.namelist()
            for name in names:
                base = name.rpartition("/")[2]
                if (
                    base.startswith("custom_obj_")
                    or "/aotinductor/" in name
                    or base.endswith((".so", ".dll", ".dylib"))
                ):
                    raise InputError(
                        "model", str(file), "a program of tensors and operators alone", f"It holds {name}."
                    )
                if base.endswith(".json"):
                    _vet_json(archive, name, file)
                elif base.endswith(".pt"):
                    _vet_pickle(archive.read(name), name, file)
    except (zipfile.BadZipFile, OSError, ValueError, RuntimeError, NotImplementedError) as error:
        if isinstance(error, InputError):
            raise
        raise _unreadable(file, error) from error


def _vet_json(archive: zipfile.ZipFile, name: str, file: Path) -> None:
    for entry in _objects(json.loads(archive.read(name) or b"null")):
        expression = entry.get("expr_str")
        if isinstance(expression, str) and (EXPRESSION.fullmatch(expression) is None or "__" in expression):
            raise InputError("model", str(file), "symbolic sizes that are arithmetic", f"It has {expression!r}.")
        if entry.get("use_pickle") is True:
            path = f"{name.rpartition('/')[0]}/{entry.get('path_name')}"
            if path not in archive.namelist():
                raise InputError("model", str(file), "a whole program", f"It lacks {path}.")
            _vet_pickle(archive.read(path), path, file)


def _vet_pickle(data: bytes, name: str, file: Path) -> None:
    if not data:
        return
    try:
        torch.load(io.BytesIO(data), weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise InputError("model", str(file), "tensors alone in its pickles", f"{name} holds more.") from error


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _objects(item)


def _unreadable(file: Path, error: BaseException) -> InputError:
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return InputError("model", str(file), "a program written by torch.export.save", f"Reading it failed: {first}")
