"""Clocks for the scenarios: the machine's, and a virtual one, on which a schedule of hours takes no time."""

from __future__ import annotations

import time
from typing import Final, Protocol

SPIN_S: Final = 0.001
"""The last part of a wait, which is not slept: a sleep ends later than asked."""


class Clock(Protocol):
    """Time in seconds from any fixed point."""

    def now(self) -> float:
        """The present time."""
        ...

    def wait_until(self, when: float) -> None:
        """Return at that time, or at once if it has passed."""
        ...


class WallClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        """Seconds from a point that the system chooses."""
        return time.perf_counter()

    def wait_until(self, when: float) -> None:
        """Sleep, then spin for the last millisecond."""
        left = when - time.perf_counter()
        if left > SPIN_S:
            time.sleep(left - SPIN_S)
        while time.perf_counter() < when:
            pass


class VirtualClock:
    """A clock that moves when it is told to."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        """Seconds since it was made."""
        return self._now

    def wait_until(self, when: float) -> None:
        """Move on to that time."""
        self._now = max(self._now, when)

    def advance(self, seconds: float) -> None:
        """Move on by that many seconds."""
        self._now += seconds
