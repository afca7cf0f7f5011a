"""Compiles C sources to shared libraries with the host's compiler and keeps them in a checked cache.

A library's file ends with the SHA-256 of the bytes before it, which loaders do not read. A file that was truncated or changed,
or that another user could have written, is compiled again (`compiled_cache`). The file's name holds a digest of all that decides
its contents: the source, the flags, the compiler and the processor.

Threads: `-fopenmp` among the flags links the OpenMP library that PyTorch has loaded, so that a kernel runs on PyTorch's
threads (`torch.set_num_threads` applies) and no second thread pool competes for the cores.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch

from convoy.engines.compilers import compiled_cache
from convoy.engines.compilers.compiled_cache import folder_at, summed
from convoy.engines.compilers.instruction_sets import march, vector_floats
from convoy.errors import CompileError
from convoy.support import Support
from convoy.target import usable_cores
from convoy.untrusted import escape_controls

COMPILERS: Final = ("cc", "gcc", "clang")
"""Tried in this order on the PATH."""

TIMEOUT_S: Final = 300.0
"""A source of several megabytes takes gcc a minute; what takes longer is no kernel."""

_OPENMP: Final = re.compile(r"/lib(gomp|iomp5|omp)[^/]*\.so[^/]*$")
_PROBE: Final = "int convoy_probe(int a) { return a + 41; }\n"
PROBE_TIMEOUT_S: Final = 20.0
"""A compiler that takes longer for one line does not work."""
_MOST_LOG: Final = 20_000  # characters of the compiler's output that are kept


def compiler_support() -> Support:
    """Whether this machine has a C compiler that works: it compiles a function, which is called."""
    if sys.platform == "win32":
        return Support.no("compiles C kernels on Linux and macOS, not on Windows")
    found = compiler()
    if not found:
        return Support.no(f"needs a C compiler on the PATH: one of {', '.join(COMPILERS)}")
    fault = _fault(found)
    return Support.no(f"the C compiler {found} does not work: {fault}") if fault else Support.yes()


@cache
def _fault(found: str) -> str:
    """Why a compiler cannot be used; empty where it can."""
    try:
        path = _compiled(found, (_PROBE,), ("-O1",), "probe", PROBE_TIMEOUT_S)
        answer = load_shared(path).convoy_probe(1)
        if answer != 42:
            raise _unusable(path, f"a function gave {answer}, expected 42")
    except CompileError as error:
        return f"{error.summary} {' '.join(error.log.split())[:200]}".strip()
    return ""


@cache
def compiler() -> str:
    """Path of the C compiler; empty where there is none."""
    return next(filter(None, map(shutil.which, COMPILERS)), "")


def compile_shared(source: str | Sequence[str], flags: Sequence[str], name: str) -> Path:
    """Compile a C source, or return the library that was compiled before.

    Args:
        source: one translation unit, or several that are compiled in parallel and linked.
        flags: compiler flags besides `-shared -fPIC`. `-march=native` is allowed, because the processor is part of the
            cache's key; `CONVOY_MAX_CPU_ISA` replaces it by an older processor.
        name: the engine's id, for the file's name and for errors.

    Returns:
        The library's path; `load_shared` opens it.

    Raises:
        CompileError: there is no compiler, it refused the source, or the cache is full; the log holds the compiler's output.
    """
    support = compiler_support()
    if not support:
        raise CompileError(name, support.reason)
    units = (source,) if isinstance(source, str) else tuple(source)
    flags = [march() if flag == "-march=native" else flag for flag in flags]
    return _compiled(compiler(), units, flags, name, TIMEOUT_S)


def _compiled(found: str, units: Sequence[str], flags: Sequence[str], name: str, timeout_s: float) -> Path:
    key = hashlib.sha256("\0".join((*units, *flags, _identity(found))).encode()).hexdigest()[:24]
    path = compiled_folder() / f"{name}-{key}.so"
    if not is_whole(path):
        _compile(found, units, flags, name, path, timeout_s)
    return path


def threads_flag() -> tuple[str, ...]:
    """The flag of sources that run on torch's own threads; nothing where torch has no OpenMP."""
    return ("-fopenmp",) if torch.backends.openmp.is_available() else ()


_compiling: Final[dict[tuple[object, ...], threading.Lock]] = {}
"""A lock for each library that was asked for."""


def library(source: Path | tuple[Path, ...], flags: tuple[str, ...], engine: str, units: int = 1) -> ctypes.CDLL:
    """Compile a source of this package for PyTorch's threads and open it, once; raises CompileError if that fails.

    Several threads may ask for the same library: one compiles it, and the others wait.

    Args:
        source: a file, or several that are concatenated.
        flags: compiler flags.
        engine: the engine's id, for errors.
        units: objects that are compiled from it at the same time and linked. If there are several, UNIT (0, 1, ...) tells which.
    """
    with _compiling.setdefault((source, flags, engine), threading.Lock()):
        return _library(source, flags, engine, units)


@cache
def _library(source: Path | tuple[Path, ...], flags: tuple[str, ...], engine: str, units: int) -> ctypes.CDLL:
    parts = (source,) if isinstance(source, Path) else source
    text = "".join(part.read_text(encoding="utf-8") for part in parts)
    texts = [f"#define UNIT {unit}\n" * (units > 1) + text for unit in range(units)]
    return load_shared(compile_shared(texts, [*flags, *threads_flag()], engine))


@cache
def lanes() -> int:
    """Floats of a vector register."""
    return vector_floats()


class Library(ctypes.CDLL):
    """A compiled library; where it lacks a function, the compiler is at fault, and the file is not kept."""

    def __init__(self, opened: str, path: Path) -> None:
        self._kept = path
        super().__init__(opened)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__"):
                raise
            raise _unusable(self._kept, f"it has no function {name}") from None


@cache
def load_shared(path: Path) -> Library:
    """Open a library of `compile_shared`; calls of its functions release Python's GIL.

    Raises:
        CompileError: the library cannot be opened, or a function that is looked up is missing.
    """
    folder = folder_at(path.parent)
    try:
        return Library(str(path) if folder is None else folder.loadable(path.name), path)
    except OSError as error:
        raise _unusable(path, str(error)) from error


def _unusable(path: Path, why: str) -> CompileError:
    """The error for a library that is of no use; its file is removed, for a mended compiler would not replace it."""
    with suppress(OSError):
        path.unlink()
    name = path.name.rpartition("-")[0]
    return CompileError(name, "the C compiler made a library that cannot be used", why)


def is_whole(path: Path) -> bool:
    """Whether a library exists, is unchanged, and could only have been written by the user."""
    folder = folder_at(path.parent)
    return folder is not None and folder.read(path.name) is not None


def _compile(found: str, units: Sequence[str], flags: Sequence[str], name: str, path: Path, timeout_s: float) -> None:
    """Compile the objects, then link the library in a temporary folder; the cache only ever holds complete files."""
    try:
        _make(found, units, flags, name, path, timeout_s)
    except OSError as error:
        raise CompileError(name, f"its code could not be written into {path.parent}", str(error)) from error


def _make(found: str, units: Sequence[str], flags: Sequence[str], name: str, path: Path, timeout_s: float) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".building-") as folder:
        objects = [Path(folder) / f"kernel{index}.o" for index in range(len(units))]

        def compile_unit(unit: str, made: Path) -> None:
            text = made.with_suffix(".c")
            text.write_text(unit, encoding="utf-8")
            _run([found, *flags, "-fPIC", "-c", str(text), "-o", str(made)], name, timeout_s)

        with ThreadPoolExecutor(usable_cores()) as pool:
            list(pool.map(compile_unit, units, objects))
        library = Path(folder) / "kernel.so"
        # Linking without -fopenmp: that flag would link the compiler's own OpenMP library besides PyTorch's.
        threads = [openmp_library()] if "-fopenmp" in flags else []
        _run([found, "-shared", *map(str, objects), *filter(None, threads), "-lm", "-o", str(library)], name, timeout_s)
        body = library.read_bytes()
        library.write_bytes(summed(body, mark=True))
        library.chmod(0o700)  # whatever the umask: a file that others can write to is not loaded
        library.replace(path)


def _run(command: Sequence[str], name: str, timeout_s: float) -> None:
    code, words = run_limited(command, name, timeout_s)
    if code:
        raise CompileError(name, "the C compiler refused the source", words)


_at_work: Final[set[int]] = set()


def compilers_at_work() -> int:
    """How many compilers that this process started are running now: each keeps a core busy."""
    return len(_at_work)


def run_limited(command: Sequence[str], name: str, timeout_s: float) -> tuple[int, str]:
    """Run a compiler with a time limit; returns its exit code and the beginning of its output, decoded leniently.

    A compiler starts other processes (cc1, as, ld): all of them are ended together.

    Raises:
        CompileError: the compiler could not be started, or did not end in time.
    """
    with tempfile.TemporaryFile() as said:
        try:
            # A session of its own: its process group can be killed, and the terminal's Ctrl-C reaches this process first.
            process = subprocess.Popen(  # noqa: S603
                command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, start_new_session=True
            )
        except (OSError, ValueError) as error:
            raise CompileError(name, "the C compiler could not be started", str(error)) from error
        _at_work.add(process.pid)
        try:
            code = process.wait(timeout_s)
        except BaseException as error:  # KeyboardInterrupt too
            with suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if isinstance(error, subprocess.TimeoutExpired):
                raise CompileError(name, f"the C compiler did not end within {timeout_s:g} s") from None
            raise
        finally:
            _at_work.discard(process.pid)
        said.seek(0)
        return code, escape_controls(said.read(_MOST_LOG).decode("utf-8", "replace"))


@cache
def openmp_library() -> str:
    """Path of the OpenMP library that PyTorch has loaded; empty if it has none: kernels that need OpenMP cannot be linked."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    mapped = {line.split(maxsplit=5)[-1] for line in lines if "/" in line}
    ours = str(Path(torch.__file__).parent.parent)  # another package's copy may be loaded too: numpy's, scipy's
    return min(
        (p for p in mapped if _OPENMP.search(p)), key=lambda p: (not p.startswith(ours + "/torch"), p), default=""
    )


@cache
def _identity(found: str) -> str:
    """The compiler and the processor, for the cache's key."""
    _, version = run_limited([found, "--version"], "compiler", PROBE_TIMEOUT_S)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    features = next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    return f"{found} {version.partition(chr(10))[0]} {platform.machine()} {features} {openmp_library()}"


def compiled_folder() -> Path:
    """Where libraries are kept: the user's cache, or a folder of this process where that cannot be trusted or written."""
    return compiled_cache.compiled_folder()
