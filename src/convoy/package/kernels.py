"""Compiled code of a package: kernels in C as one library without dependencies but the C library.

The library is compiled for an instruction set (`Needs.flags`), not for one processor, and without OpenMP: threads share a
kernel's work as a team (team.c).
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch

from convoy.engines.base import Packed
from convoy.engines.compilers.compiled_cache import folder_at
from convoy.engines.compilers.host_compiler import compile_shared, lanes
from convoy.engines.compilers.instruction_sets import KERNEL_LEVELS, cpu_flags
from convoy.engines.cpu.native_launch import PARALLEL_H, KernelSource, Native, NativeExecutable, Operand, bound_call
from convoy.errors import CompileError, PackageError
from convoy.package.manifest import Needs
from convoy.package.program_file import Launch

NAME: Final = "package"
"""In the names of compiled files, and in errors of the compiler."""

POOL_FUNCTIONS: Final = ("convoy_pool_new", "convoy_pool_free", "convoy_pool_run")
"""Functions of team.c."""

_COMMON: Final = ("-std=gnu11", "-O3", "-fno-math-errno", "-fno-trapping-math", "-DCONVOY_TEAM")

TEAM_C: Final = Path(__file__).with_name("team.c")


_loaded: Final[dict[bytes, ctypes.CDLL]] = {}
"""SHA-256 of a library → the library."""

_loading: Final = threading.Lock()


@dataclass(frozen=True, slots=True)
class CompiledKernels:
    """A library for a package.

    Attributes:
        flags: the compiler's flags.
        sources: C sources by member name.
        code: the library.
    """

    flags: tuple[str, ...]
    sources: dict[str, str]
    code: bytes


def needs_here(kernels: Sequence[KernelSource]) -> Needs:
    """What compiled kernels, and the weights packed for them, need of a machine; without kernels: nothing but its system."""
    packs, (name, flags, _) = bool(kernels), _level()
    flags = flags.union(*(kernel.cpu_flags for kernel in kernels))
    libc = " ".join(platform.libc_ver()) if packs else ""
    known = tuple(sorted(flags)) if packs else ()
    width = lanes() if packs else 0
    return Needs(platform.system().lower(), platform.machine(), libc, name if packs else "any", known, width)


def _level() -> tuple[str, frozenset[str], tuple[str, ...]]:
    """The instruction set of the kernels: its name, the processor's features that it needs, the compiler's flags."""
    if platform.machine() in ("x86_64", "AMD64"):
        for name, flags, floats, march in KERNEL_LEVELS:
            if floats == lanes():
                # The processor's tuning decides where products and sums are fused: with it the bits are those of this machine.
                return name, flags, (march, "-mtune=native")
    return platform.machine(), frozenset(), ()


def compile_kernels(kernels: Sequence[KernelSource]) -> CompiledKernels:
    """Compile kernels to one library; raises CompileError."""
    flags = (*_COMMON, *_level()[2])
    parts = (PARALLEL_H, TEAM_C)
    sources = {"kernels/team.c": "".join(part.read_text(encoding="utf-8") for part in parts)}
    for kernel in kernels:
        defines = [flag.removeprefix("-D").replace("=", " ", 1) for flag in kernel.flags if flag.startswith("-D")]
        text = "".join(f"#define {define}\n" for define in defines) + kernel.text()
        sources[source_member(kernel)] = text
    path = compile_shared(list(sources.values()), flags, NAME)
    folder = folder_at(path.parent)
    code = None if folder is None else folder.read(path.name)
    if code is None:
        raise CompileError(NAME, "the compiled kernels cannot be read again", str(path))
    return CompiledKernels(flags, sources, code)


def source_member(kernel: KernelSource) -> str:
    """Name of the member with a kernel's source."""
    return f"kernels/{kernel.function.removeprefix('convoy_')}.c"


def load_library(code: memoryview) -> ctypes.CDLL:
    """Load a package's library into this process. This runs its code: the caller trusts it.

    A library stays loaded; the same code is loaded once.

    Raises:
        PackageError: the loader refuses it.
    """
    key = hashlib.sha256(code).digest()
    with _loading:
        if key not in _loaded:
            try:
                _loaded[key] = _opened(code, len(_loaded))
            except OSError as error:
                raise PackageError("library", str(error), "a library that this machine's loader accepts") from error
        return _loaded[key]


def _opened(code: memoryview, number: int) -> ctypes.CDLL:
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("convoy-package", os.MFD_CLOEXEC)
        try:
            _write_all(descriptor, code)
            # The loader takes a name that it has seen for the library that it opened then, and descriptors' numbers return:
            # the number of slashes makes each name another one. (libconvoy puts its slashes behind `fd`.)
            name = f"/proc/self{'/' * (number + 2)}fd/{descriptor}"
            return ctypes.CDLL(name, mode=os.RTLD_LOCAL | os.RTLD_NOW)
        finally:
            os.close(descriptor)
    with tempfile.TemporaryDirectory(prefix="convoy-package-") as folder:
        path = Path(folder) / "kernels.so"
        path.write_bytes(code)
        return ctypes.CDLL(str(path))


def _write_all(descriptor: int, code: memoryview) -> None:
    while code:
        code = code[os.write(descriptor, code) :]


class PackagedKernel(NativeExecutable):
    """A launch as a package holds it: its settings, and a function of the package's library.

    Args:
        launch: the launch.
        functions: the library's functions, by the manifest's indices.
        workspace_bytes: scratch memory of the program's launches.
    """

    def __init__(self, launch: Launch, functions: Sequence[Any], workspace_bytes: int) -> None:
        self.call = functions[launch.kernel]
        self.workspace_bytes = workspace_bytes if ("workspace", 0) in launch.tensors else 0
        self._launch = launch
        self._settings = (ctypes.c_int64 * max(1, len(launch.settings)))(*launch.settings)
        for word, kernel in launch.calls:
            self._settings[word] = ctypes.cast(functions[kernel], ctypes.c_void_p).value or 0
        self._functions = functions

    def native(self, constants: Packed) -> Native | None:
        """The launch, with the tensors of these constants."""
        tensors: list[Operand] = []
        for operand in self._launch.tensors:
            if operand is not None and operand[0] == "constant":
                tensors.append(constants[operand[1]])
            else:
                tensors.append(operand)  # pyright: ignore[reportArgumentType]
        return Native(self._settings, tuple(tensors))


def functions_of(library: ctypes.CDLL, names: Sequence[str]) -> list[Any]:
    """Functions of a library; raises PackageError if one is missing."""
    try:
        return [bound_call(library, name) for name in names]
    except AttributeError as error:
        raise PackageError("library", str(error), "all functions that the manifest names") from error


class TeamRunner:
    """Runs chains of launches by a package's library: each calling thread has a team, kept from call to call.

    Args:
        library: the package's.
        most_threads: threads that the launches were made for.
    """

    def __init__(self, library: ctypes.CDLL, most_threads: int) -> None:
        self._new, self._free, self._run = functions_of(library, POOL_FUNCTIONS)
        self._new.argtypes, self._new.restype = [ctypes.c_int64], ctypes.c_void_p
        self._free.argtypes, self._free.restype = [ctypes.c_void_p], None
        self._run.argtypes, self._run.restype = (
            [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p],
            None,
        )
        self._most, self._local = most_threads, threading.local()

    def __call__(self, launches: Any, count: int, pointers: Any) -> None:
        """Make the launches, on as many threads as torch has."""
        threads = min(self._most, torch.get_num_threads())
        team: _Team | None = getattr(self._local, "team", None)
        if team is None or team.threads != threads:
            team = self._local.team = _Team(self._new(threads), threads, self._free)
        self._run(team.pool, launches, count, pointers)


@dataclass(frozen=True, slots=True)
class _Team:
    """The threads of one calling thread; they end with it."""

    pool: int | None
    threads: int
    free: Callable[[int | None], object]

    def __del__(self) -> None:
        self.free(self.pool)


def why_not_code(needs: Needs) -> str:
    """Why compiled code cannot run on this machine; empty if it can."""
    here = Needs(platform.system().lower(), platform.machine(), "", _here_isa(), (), 0)
    missing = sorted(set(needs.flags) - cpu_flags())
    if (needs.system, needs.machine) != (here.system, here.machine):
        return f"it was compiled for {needs}; this is {here}"
    if missing:
        return f"it was compiled for {needs}; this processor lacks {', '.join(missing)}"
    if needs.libc and needs.libc.split(" ")[0] != platform.libc_ver()[0]:
        return f"it was compiled for {needs.libc}; this is {' '.join(platform.libc_ver()) or 'another C library'}"
    return ""


def why_not_packed(needs: Needs) -> str:
    """Why packed weights cannot be used by kernels that are built here; empty if they can."""
    if not needs.lanes or needs.lanes == lanes():
        return ""
    return (
        f"its weights are packed for {needs.lanes} floats a register ({needs}), and kernels of this process have {lanes()} "
        f"({_here_isa()})"
    )


@cache
def _here_isa() -> str:
    return _level()[0]
