"""How long a peer may compile, and a limit that compilers do not swallow."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

COMPILE_S = 300
"""Seconds that a peer may take to compile: `max-autotune` took 279 for ResNet-50 (fp16, batch 1, H200, commit b442138)."""


class _LateError(BaseException):
    """No `Exception`: Inductor's tuning goes on after those, with the next choice."""


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in what takes longer; in the main thread alone, as Python's signals are."""

    def late(*signal_and_frame: object) -> None:
        del signal_and_frame
        raise _LateError

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    except _LateError as error:
        raise TimeoutError(f"took longer than {seconds:g} s") from error
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
