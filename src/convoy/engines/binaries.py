"""Device binaries in the user's cache, checked by their SHA-256 before they are used: a bad one is a miss."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from convoy.engines import host_compiler

_DIGEST_BYTES: Final = 32


def cached(engine: str, key: Sequence[str], make: Callable[[], bytes]) -> bytes:
    """What `make` gives, or gave before for this key.

    Args:
        engine: its id, the beginning of the file's name.
        key: everything that decides what is made: source, architecture, compiler and its version, options.
        make: makes it; what it raises passes through.
    """
    name = hashlib.sha256("\0".join(key).encode()).hexdigest()[:24]
    path = host_compiler.compiled_folder() / f"{engine}-{name}.cubin"
    found = _read(path)
    if found is None:
        found = make()
        _write(path, found)
    return found


def _read(path: Path) -> bytes | None:
    try:
        content = path.read_bytes()
    except OSError:
        return None
    body, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
    return body if body and hashlib.sha256(body).digest() == digest else None


def _write(path: Path, body: bytes) -> None:
    """What appears is whole; a cache that cannot be written is no fault of the binary's."""
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".building-", delete=False) as file:
            file.write(body + hashlib.sha256(body).digest())
        Path(file.name).replace(path)
    except OSError:
        return
