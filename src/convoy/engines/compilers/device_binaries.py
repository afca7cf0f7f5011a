"""Device binaries and answers of libraries in the user's cache, checked by owner and SHA-256 before use: a bad one is a miss."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from convoy.engines.compilers import host_compiler
from convoy.engines.compilers.compiled_cache import folder_at, summed


def cached(engine: str, key: Sequence[str], make: Callable[[], bytes], *, suffix: str = ".cubin") -> bytes:
    """The result of `make`, or a cached result of the same key.

    Args:
        engine: the engine's id, the beginning of the file's name.
        key: everything that decides the result: source, architecture, compiler and its version, options.
        make: makes the binary; its exceptions pass through.
        suffix: of the file's name: `.cubin`, or `.json` for what a library said.
    """
    found = kept(engine, key, suffix)
    if found is None:
        found = make()
        keep(engine, key, found, suffix)
    return found


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
