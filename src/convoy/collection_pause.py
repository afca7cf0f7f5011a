"""A pause of Python's collector of reference cycles, for stages that make much plain data."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def collection_paused() -> Generator[None]:
    """Pause the collector for the block, if it runs.

    A stage that makes a hundred thousand small objects sets off full collections, and each of these visits every object of
    PyTorch: together they take a fifth of a first answer. Such objects are freed by their reference counts. Blocks that hold
    tensors, which may be part of cycles, must not be paused.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
