"""How long something may take: a peer that compiles, a part of a benchmark."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

COMPILE_S = 300
"""Seconds that a peer may take to compile: `max-autotune` took 279 for ResNet-50 (fp16, batch 1, H200, commit b442138)."""


class TimeIsUpError(Exception):
    """`--seconds` have passed."""


class _LateError(BaseException):
    """No `Exception`: Inductor's tuning goes on after those, with the next choice."""


@contextmanager
def _alarm(seconds: float, error: type[BaseException]) -> Iterator[None]:
    """Raise an error in what takes longer; 0: whatever it takes. In the main thread alone, as Python's signals are."""

    def late(*signal_and_frame: object) -> None:
        del signal_and_frame
        raise error

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def until(seconds: float) -> Iterator[None]:
    """Raise TimeIsUpError in what takes longer, for whoever has something to show by then; 0: whatever it takes."""
    with _alarm(seconds, TimeIsUpError):
        yield


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """End what takes longer, whatever it catches, and raise TimeoutError."""
    try:
        with _alarm(seconds, _LateError):
            yield
    except _LateError as error:
        raise TimeoutError(f"took longer than {seconds:g} s") from error
