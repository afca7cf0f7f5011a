"""Work that Triton does once for a process or a signature, begun in threads before a kernel waits for it.

Triton reads all of its own files to name its cache (0.7 s), compiles a module in C for the driver, and for each signature a
launcher in C (0.2 s each): 1.7 s of ResNet-18's first answer on an H100 with empty caches, commit b9519339.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from functools import cache
from typing import Any, Final, cast

import torch

THREADS: Final = 4
"""Launchers that are compiled at one time; each compiler is a process of its own."""


@cache
def _begun() -> threading.Thread:
    """The thread that prepares Triton, begun once."""
    thread = threading.Thread(target=_prepare, name="convoy-triton", daemon=True)
    thread.start()
    return thread


def _prepare() -> None:
    try:
        from triton.runtime import cache as triton_cache
        from triton.runtime import driver

        cast("Any", triton_cache).triton_key()
        _ = cast("Any", driver).active.utils
    except Exception:  # noqa: S110 - whatever fails here fails again, with its message, where it is needed
        pass


def prepare_triton() -> None:
    """Begin to prepare Triton, in a thread. Only for a process that will compile and launch Triton kernels on a GPU."""
    _begun()


def wait_until_prepared() -> None:
    """Wait for the thread, if there is one: two threads would do the same work twice."""
    if _begun.cache_info().currsize and threading.current_thread() is not _begun():
        _begun().join()


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS, thread_name_prefix="convoy-triton")


def compile_launcher(compiled: Any) -> Future[Any] | None:
    """Begin to compile the launcher of a compiled kernel into Triton's cache.

    Args:
        compiled: what `triton.compile` returned.

    Returns:
        For `launcher_ready`; None where there is no GPU to launch it on.
    """
    if not torch.cuda.is_available():
        return None
    return _pool().submit(_compiled_launcher, compiled)


def _compiled_launcher(compiled: Any) -> None:
    from triton.runtime import driver

    wait_until_prepared()
    cast("Any", driver).active.launcher_cls(compiled.src, compiled.metadata)


def launcher_ready(launcher: Future[Any]) -> None:
    """Wait for a launcher. One that could not be compiled raises its error at the launch, which compiles it again."""
    wait_for((launcher,))
