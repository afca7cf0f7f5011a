"""Device binaries and answers of libraries in the user's cache, checked by owner and SHA-256 before use: a bad one is a miss."""

from __future__ import annotations

import hashlib
import tempfile
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from convoy.engines.compilers import host_compiler
from convoy.engines.compilers.compiled_cache import folder_at, summed


def cached(engine: str, key: Sequence[str], make: Callable[[], bytes], *, suffix: str = ".cubin") -> bytes:
    """The result of `make`, or a cached result of the same key.

    Threads that want the same key wait for the first one: layers of several sizes have one kernel.

    Args:
        engine: the engine's id, the beginning of the file's name.
        key: everything that decides the result: source, architecture, compiler and its version, options.
        make: makes the binary; its exceptions pass through.
        suffix: of the file's name: `.cubin`, or `.json` for what a library said.
    """
    found = kept(engine, key, suffix)
    if found is not None:
        return found
    with _made_once(_path(engine, key, suffix)):
        found = kept(engine, key, suffix)
        if found is None:
            found = make()
            keep(engine, key, found, suffix)
    return found


_locks: dict[Path, list[Any]] = {}
_guard = threading.Lock()


@contextmanager
def _made_once(path: Path) -> Generator[None]:
    """One thread at a time for each path. A lock lives as long as a thread wants it."""
    with _guard:
        lock = _locks.setdefault(path, [threading.Lock(), 0])
        lock[1] += 1
    try:
        with lock[0]:
            yield
    finally:
        with _guard:
            lock[1] -= 1
            if not lock[1]:
                del _locks[path]


def kept(engine: str, key: Sequence[str], suffix: str) -> bytes | None:
    """What `keep` wrote; None if it is not there, not whole, or could be somebody else's."""
    path = _path(engine, key, suffix)
    folder = folder_at(path.parent)
    return None if folder is None else folder.read(path.name)


def keep(engine: str, key: Sequence[str], body: bytes, suffix: str) -> None:
    """Write a file atomically; a cache that cannot be written is ignored."""
    path = _path(engine, key, suffix)
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".building-", delete=False) as file:
            file.write(summed(body, mark=False))
        Path(file.name).replace(path)
    except OSError:
        return


def _path(engine: str, key: Sequence[str], suffix: str) -> Path:
    name = hashlib.sha256("\0".join(key).encode()).hexdigest()[:24]
    return host_compiler.compiled_folder() / f"{engine}-{name}{suffix}"
