"""A saved torch.export program (.pt2) as a module: read as data, or, where the user trusts it, as PyTorch reads it."""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.export import ExportedProgram

from convoy.errors import InputError
from convoy.untrusted import escape_controls, open_file
from convoy.zoo.model_names import DTYPES
from convoy.zoo.pt2.load import read_program
from convoy.zoo.pt2.refusal import RefusedError
from convoy.zoo.pt2.sizes import check_sizes

MOST_BYTES: Final = 16 << 30
"""Of one file; it is read into memory, so that exactly the checked bytes are loaded."""


def load_program(file: Path, dtype: torch.dtype | None, *, trust: bool = False) -> nn.Module:
    """Load a program as a module in evaluation mode; `example_input_array` holds its example inputs where it has some.

    A program with dynamic shapes takes every size that it was exported for.

    Args:
        file: as `torch.export.save` wrote it.
        dtype: that its floating-point parameters must have; None: any.
        trust: the file may hold code, which is run: `torch.export.load` reads it as it is.

    Raises:
        InputError: it is not there, is no such program, holds anything but data and is not trusted, or has another dtype.
    """
    if not file.exists():
        raise InputError("model", str(file), "a .pt2 file that is there")
    with open_file(file, MOST_BYTES, "model") as opened:
        data = opened.read(os.fstat(opened.fileno()).st_size)
    try:
        program = _load(io.BytesIO(data)) if trust else None
        checked = None if trust else read_program(data)
        del data
        if checked is not None:
            program = _load(checked.archive)
    except RefusedError as refused:
        raise _refused(file, refused) from refused
    except Exception as error:  # everything: a damaged program makes torch fail in any way
        raise _unreadable(file, error) from error
    assert program is not None
    other = {p.dtype for p in program.parameters() if p.is_floating_point()} - {dtype}
    if dtype is not None and other:
        names = {kind: name for name, kind in DTYPES.items()}
        found = names.get(other.pop(), "another dtype")
        todo = f"Give it: --dtype {found} (dtype={found!r})." if found in DTYPES else ""
        raise InputError("dtype", names.get(dtype, str(dtype)), f"{found}, which {file} was exported in", todo)
    try:
        with _quiet():
            module = program.module(check_guards=checked is None)
    except Exception as error:  # everything, as above
        raise _unreadable(file, error) from error
    if checked is not None:
        check_sizes(module, program, checked.sizes)
    args, kwargs = program.example_inputs or ((), {})
    return ready_module(module, tuple(args) if args and not kwargs else None)


def ready_module(module: nn.Module, example: tuple[Any, ...] | None) -> nn.Module:
    """An exported module in evaluation mode, with its example inputs as `example_input_array` where there are some.

    An exported module refuses .eval() and .train(): its mode is what it was exported in. Those of every module, which set flags
    that its graph does not read, let it go where any module goes.
    """
    for name in ("eval", "train"):
        module.__dict__.pop(name, None)
    module.eval()
    if example is not None:
        vars(module)["example_input_array"] = example
    return module


def _load(file: Any) -> ExportedProgram:
    with _quiet():
        return torch.export.load(file)


@contextmanager
def _quiet() -> Generator[None]:
    """Hide torch.export's log: it writes a traceback for an error that is one line here."""
    log = logging.getLogger("torch.export")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


def _refused(file: Path, refused: RefusedError) -> InputError:
    if not refused.is_code:
        return InputError("model", str(file), "a whole program written by torch.export.save", refused.found)
    todo = f"{refused.found} If you trust the author of the file, allow it to run code: --trust (trust=True)."
    return InputError("model", str(file), "a program of plain tensors and PyTorch's own operators", todo)


def _unreadable(file: Path, error: BaseException) -> InputError:
    first = escape_controls((str(error).strip().splitlines() or [type(error).__name__])[0])[:300]
    return InputError("model", str(file), "a program written by torch.export.save", f"Reading it failed: {first}")
