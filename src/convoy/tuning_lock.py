"""One thread tunes at a time; and where Dynamo compiles too, nobody waits for the other for ever.

A call of `torch.compile` holds Dynamo's lock when it asks Convoy's backend to tune, so Dynamo's lock comes first, then Convoy's.
Importing Dynamo takes a second or two, which a tuning call that needs no part of it must not pay. While Dynamo is not imported,
nobody holds its lock. Work that needs it later in the call takes it by `with_dynamo`.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final

_ONE_AT_A_TIME: Final = threading.RLock()


class _Depth(threading.local):
    """How many times this thread holds the lock."""

    held = 0


_DEPTH: Final = _Depth()


@contextmanager
def one_at_a_time() -> Generator[None]:
    """Hold Convoy's lock, and Dynamo's where Dynamo is imported."""
    with _dynamo_lock() or nullcontext():
        _take(1)
        try:
            yield
        finally:
            _give_up(1)


@contextmanager
def with_dynamo() -> Generator[None]:
    """Import Dynamo, and hold its lock; for work that takes it, such as Inductor's.

    Another thread may have imported Dynamo since this one took Convoy's lock, and be waiting for that with Dynamo's lock in hand.
    It then goes first.
    """
    lock: Any = _dynamo_lock()
    if not lock.acquire(blocking=False):
        levels = _DEPTH.held
        _give_up(levels)
        lock.acquire()
        _take(levels)
    try:
        yield
    finally:
        lock.release()


def _dynamo_lock() -> AbstractContextManager[object] | None:
    """Dynamo's lock; None while Dynamo is not imported."""
    return getattr(sys.modules.get("torch._dynamo.convert_frame"), "compile_lock", None)


def _take(levels: int) -> None:
    for _ in range(levels):
        _ONE_AT_A_TIME.acquire()
    _DEPTH.held += levels


def _give_up(levels: int) -> None:
    for _ in range(levels):
        _ONE_AT_A_TIME.release()
    _DEPTH.held -= levels
