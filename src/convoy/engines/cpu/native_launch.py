"""Launches without Python: a C function that gets its settings and its tensors' addresses.

    void call(const void *settings, void *const *tensors)

All C kernels of this package have this signature, so that a program on a CPU can run a chain of them in one call
(`convoy.program.native_chains`). A launch from Python makes the same call.
"""

from __future__ import annotations

import ctypes
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import torch

from convoy.engines.base import Buffers, Executable, Packed
from convoy.engines.compilers.host_compiler import library
from convoy.errors import LaunchError

Operand = tuple[Literal["arg", "result", "workspace"], int] | torch.Tensor | None
"""Where a pointer comes from: a launch's buffers, by kind and number; a tensor that stays; or nowhere (NULL)."""


PARALLEL_H: Final = Path(__file__).with_name("parallel.h")
"""The first part of every source: loops that threads share."""


@dataclass(frozen=True, slots=True)
class KernelSource:
    """A function of a C source of this package, and how it is compiled.

    Attributes:
        parts: files that are concatenated.
        flags: compiler flags, without those for threads.
        engine: the engine's id, for errors and file names.
        function: the function's name.
        cpu_flags: features of the processor that it needs beside those that it is compiled for, in Linux's names.
        units: objects that are compiled from the source at the same time (`host_compiler.library`); it compiles as one too.
    """

    parts: tuple[Path, ...]
    flags: tuple[str, ...]
    engine: str
    function: str
    cpu_flags: tuple[str, ...] = ()
    units: int = 1

    def bound(self) -> Callable[..., object]:
        """The function, compiled for this machine; raises CompileError."""
        return bound_call(library(self.parts, self.flags, self.engine, self.units), self.function)

    def text(self) -> str:
        """The whole source."""
        return "".join(part.read_text(encoding="utf-8") for part in self.parts)


@dataclass(frozen=True, slots=True)
class Native:
    """One launch without its buffers.

    Attributes:
        settings: the function's first argument.
        tensors: the source of each pointer, in order.
        calls: (index of a 64-bit word of the settings, kernel whose address it holds), for a kernel that calls others.
    """

    settings: ctypes.Structure | ctypes.Array[ctypes.c_int64]
    tensors: tuple[Operand, ...]
    calls: tuple[tuple[int, KernelSource], ...] = ()


class NativeExecutable(Executable):
    """An executable that is one such function."""

    kernel: KernelSource
    """Where the function comes from."""

    call: Callable[..., object]
    """The function."""

    def use(self, kernel: KernelSource) -> None:
        """Compile a function and launch it from now on; raises CompileError."""
        self.kernel, self.call = kernel, kernel.bound()

    @abstractmethod
    def native(self, constants: Packed) -> Native | None:
        """The launch with these packed constants; None where there is nothing to do."""

    def launch(self, buffers: Buffers, workspace: torch.Tensor | None) -> None:
        """One call."""
        native = self.native(buffers.constants)
        if native is None:
            return
        sources = {"arg": buffers.args, "result": buffers.results, "workspace": (workspace,)}
        given = [sources[kind[0]][kind[1]] if isinstance(kind, tuple) else kind for kind in native.tensors]
        pointers = (ctypes.c_void_p * len(given))(*(None if tensor is None else address(tensor) for tensor in given))
        self.call(ctypes.byref(native.settings), pointers)


def address(tensor: torch.Tensor) -> int:
    """The address of a tensor's values.

    Raises:
        LaunchError: the tensor has no memory, as a FakeTensor or a meta tensor: reading it would kill the process.
    """
    found = tensor.data_ptr() if type(tensor) in _PLAIN else 0
    if not found and tensor.numel():
        raise LaunchError(f"a {type(tensor).__name__} on {tensor.device} has no memory that a kernel could use")
    return found


_PLAIN: Final = (torch.Tensor, torch.nn.Parameter)


def bound_call(library: ctypes.CDLL, name: str) -> Callable[..., object]:
    """A function of a library with the signature of this module."""
    function = library[name]
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    function.restype = None
    return function
