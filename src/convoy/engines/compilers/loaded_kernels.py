"""Kernels that this process has loaded on a GPU, by the driver's handle, with the binaries that they came from.

A package holds the binaries of the kernels in a recorded CUDA graph. The driver tells their handles; it gives no binary back.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Protocol
from weakref import WeakSet


@dataclass(frozen=True, slots=True)
class LoadedKernel:
    """A kernel that was loaded.

    Attributes:
        handle: the driver's CUfunction.
        name: the kernel's name in its binary.
        cubin: the binary.
    """

    handle: int
    name: str
    cubin: bytes


class Loader(Protocol):
    """An object that loads a kernel, on one or several devices."""

    def loaded(self) -> Iterable[LoadedKernel]:
        """What it has loaded so far."""
        ...


_LOADERS: Final[WeakSet[Loader]] = WeakSet()
_LOCK: Final = threading.Lock()


def register(loader: Loader) -> None:
    """Remember an object for as long as somebody else holds it."""
    with _LOCK:
        _LOADERS.add(loader)


def loaded_kernels() -> dict[int, LoadedKernel]:
    """Everything that is loaded now, by handle."""
    with _LOCK:
        loaders = list(_LOADERS)
    return {kernel.handle: kernel for loader in loaders for kernel in loader.loaded()}
