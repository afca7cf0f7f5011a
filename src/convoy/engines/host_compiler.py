"""C sources to shared libraries by the host's own compiler, kept in a cache whose files are checked before they are used.

A library's file ends with the SHA-256 of all that stands before it, which loaders do not read: a file that was cut short or
changed is compiled again. Its name holds a digest of everything that decides what it is: the source, the flags, the compiler
and the processor.

Threads: `-fopenmp` among the flags links the OpenMP library that torch has loaded, so that a kernel runs on torch's own
threads (`torch.set_num_threads` holds for it) and no second pool spins on the same cores.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Final

import torch

from convoy.engines.instruction_sets import march, vector_floats
from convoy.errors import CompileError
from convoy.perfdb.location import cache_folder
from convoy.support import Support

COMPILERS: Final = ("cc", "gcc", "clang")
"""Tried in this order on the PATH."""

TIMEOUT_S: Final = 300.0
"""A source of several megabytes takes gcc a minute; what takes longer is no kernel."""

_OPENMP: Final = re.compile(r"/lib(gomp|iomp5|omp)[^/]*\.so[^/]*$")
_MARK: Final = b"\nconvoy-sha256:"
_DIGEST_BYTES: Final = 32


def compiler_support() -> Support:
    """Whether this machine has a C compiler."""
    if compiler():
        return Support.yes()
    return Support.no(f"needs a C compiler on the PATH: one of {', '.join(COMPILERS)}")


@cache
def compiler() -> str:
    """Path of the C compiler; empty where there is none."""
    return next(filter(None, map(shutil.which, COMPILERS)), "")


def compile_shared(source: str | Sequence[str], flags: Sequence[str], name: str) -> Path:
    """Compile a C source, or take what was compiled before.

    Args:
        source: one translation unit, or several that are compiled side by side and linked.
        flags: what the compiler is given besides `-shared -fPIC`; `-march=native` is allowed, for the processor is part of
            the cache's key; `CONVOY_MAX_CPU_ISA` puts an older processor in its place.
        name: the engine's id: beginning of the file's name, and what errors are said of.

    Returns:
        The library's path; `load_shared` opens it.

    Raises:
        CompileError: there is no compiler, it refused the source, or the cache has no room; the words of it are in the log.
    """
    found = compiler()
    if not found:
        raise CompileError(name, compiler_support().reason)
    units = (source,) if isinstance(source, str) else tuple(source)
    flags = [march() if flag == "-march=native" else flag for flag in flags]
    key = hashlib.sha256("\0".join((*units, *flags, _identity(found))).encode()).hexdigest()[:24]
    path = compiled_folder() / f"{name}-{key}.so"
    if not is_whole(path):
        _compile(found, units, flags, name, path)
    return path


def threads_flag() -> tuple[str, ...]:
    """The flag of sources that run on torch's own threads; nothing where torch has no OpenMP."""
    return ("-fopenmp",) if torch.backends.openmp.is_available() else ()


@cache
def library(source: Path | tuple[Path, ...], flags: tuple[str, ...], engine: str) -> ctypes.CDLL:
    """A source of this package, compiled to run on torch's threads and opened; raises CompileError where it cannot be had.

    Args:
        source: a file, or several that are one text.
        flags: what the compiler is given.
        engine: who asks.
    """
    parts = (source,) if isinstance(source, Path) else source
    text = "".join(part.read_text(encoding="utf-8") for part in parts)
    return load_shared(compile_shared(text, [*flags, *threads_flag()], engine))


@cache
def lanes() -> int:
    """Floats of a vector register."""
    return vector_floats()


@cache
def load_shared(path: Path) -> ctypes.CDLL:
    """Open a library that `compile_shared` made; functions called through it release Python's lock."""
    return ctypes.CDLL(str(path))


def is_whole(path: Path) -> bool:
    """Whether a library is there and is what was written."""
    try:
        content = path.read_bytes()
    except OSError:
        return False
    body, mark, rest = content[:-_DIGEST_BYTES].rpartition(_MARK)
    return bool(mark) and not rest and hashlib.sha256(body).digest() == content[-_DIGEST_BYTES:]


def _compile(found: str, units: Sequence[str], flags: Sequence[str], name: str, path: Path) -> None:
    """Objects, then library, in a folder of its own; what appears in the cache is whole."""
    try:
        _make(found, units, flags, name, path)
    except OSError as error:
        raise CompileError(name, f"its code could not be written into {path.parent}", str(error)) from error


def _make(found: str, units: Sequence[str], flags: Sequence[str], name: str, path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".building-") as folder:
        objects = [Path(folder) / f"kernel{index}.o" for index in range(len(units))]

        def compile_unit(unit: str, made: Path) -> None:
            text = made.with_suffix(".c")
            text.write_text(unit, encoding="utf-8")
            _run([found, *flags, "-fPIC", "-c", str(text), "-o", str(made)], name)

        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            list(pool.map(compile_unit, units, objects))
        library = Path(folder) / "kernel.so"
        # The link is without -fopenmp: that would bring the compiler's own OpenMP library beside torch's.
        threads = [_openmp()] if "-fopenmp" in flags else []
        _run([found, "-shared", *map(str, objects), *filter(None, threads), "-lm", "-o", str(library)], name)
        body = library.read_bytes()
        library.write_bytes(body + _MARK + hashlib.sha256(body).digest())
        library.replace(path)


def _run(command: Sequence[str], name: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompileError(name, "the C compiler could not be run to its end", str(error)) from error
    if done.returncode:
        raise CompileError(name, "the C compiler refused the source", done.stderr)


@cache
def _openmp() -> str:
    """Path of the OpenMP library that torch has loaded; empty where it has none, and who wants one cannot be linked."""
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
    """The compiler and the processor in words."""
    version = subprocess.run([found, "--version"], capture_output=True, text=True, check=False, timeout=30)  # noqa: S603
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    features = next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    return f"{found} {version.stdout.partition(chr(10))[0]} {platform.machine()} {features} {_openmp()}"


@cache
def compiled_folder() -> Path:
    """Where libraries are kept: the user's cache, or a folder of this process where that cannot be written."""
    try:
        folder = cache_folder() / "compiled"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except (OSError, RuntimeError):
        return Path(tempfile.mkdtemp(prefix="convoy-compiled-"))
