"""Progress of tuning: the function that is called with it, and a stopwatch."""

from __future__ import annotations

import time
from collections.abc import Callable

Observer = Callable[[str, int, int], None]
"""Called with the progress: message, number of things done, number of all things (0: unknown)."""


def ignore_progress(message: str, done: int, total: int) -> None:
    """An observer that does nothing."""
    del message, done, total


def announce(observer: Observer, line: str) -> None:
    """Give a line that stays on the screen to an observer that shows such lines (`announce(line)`); others ignore it."""
    say: Callable[[str], None] | None = getattr(observer, "announce", None)
    if say is not None:
        say(line)


class Stopwatch:
    """Measures the seconds since it was made."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Seconds since the stopwatch was made."""
        return time.perf_counter() - self._start
