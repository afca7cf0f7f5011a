"""The end of a call's time: tuning asks it before each further step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable


class Deadline:
    """Counts a call's time down. Another thread, or a signal handler, may end it early.

    Args:
        seconds: wall time of the call; infinite: no limit.
        clock: gives the time, in seconds.
    """

    def __init__(self, seconds: float = math.inf, clock: Callable[[], float] | None = None) -> None:
        self.seconds = seconds
        self._clock = clock or _monotonic
        self._start = self._clock()
        self._stopped = self._may_stop = False

    @property
    def spent_s(self) -> float:
        """Seconds since the call began."""
        return self._clock() - self._start

    @property
    def left_s(self) -> float:
        """Seconds that are left, at least 0; infinite without a limit."""
        return 0.0 if self._stopped else max(0.0, self.seconds - self.spent_s)

    @property
    def is_over(self) -> bool:
        """Whether no time is left."""
        return self.left_s <= 0

    @property
    def is_limited(self) -> bool:
        """Whether the call has a limit."""
        return math.isfinite(self.seconds)

    @property
    def was_stopped(self) -> bool:
        """Whether it was ended early (`stop`)."""
        return self._stopped

    def stop(self) -> None:
        """End the time now: what is known so far is used."""
        self._stopped = True

    def allow_stop(self) -> None:
        """From here on an early end leaves an answer (`request_stop`)."""
        self._may_stop = True

    def request_stop(self) -> bool:
        """End the time now if there will be an answer nevertheless; returns whether that is so."""
        if self._may_stop:
            self.stop()
        return self._may_stop

    def earlier(self, reserve_s: float) -> Deadline:
        """A deadline that ends `reserve_s` seconds before this one, and is stopped with it."""
        return _EarlierDeadline(self, reserve_s)


def _monotonic() -> float:
    return time.monotonic()


class _EarlierDeadline(Deadline):
    def __init__(self, whole: Deadline, reserve_s: float) -> None:
        self._whole, self._reserve_s = whole, reserve_s
        self.seconds = whole.seconds - reserve_s

    @property
    def spent_s(self) -> float:
        """Those of the whole call."""
        return self._whole.spent_s

    @property
    def left_s(self) -> float:
        """Those of the whole call without the reserve."""
        return max(0.0, self._whole.left_s - self._reserve_s)

    @property
    def was_stopped(self) -> bool:
        """Whether the whole call was ended early."""
        return self._whole.was_stopped

    def allow_stop(self) -> None:
        """Of the whole call."""
        self._whole.allow_stop()

    def request_stop(self) -> bool:
        """Of the whole call."""
        return self._whole.request_stop()

    def stop(self) -> None:
        """End the whole call's time."""
        self._whole.stop()
