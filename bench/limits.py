"""A limit of time on tuning: what benchmarks give `convoy` as its observer."""

from __future__ import annotations

import time
from collections.abc import Callable


class OutOfTimeError(Exception):
    """Raised into tuning when its time is up; what was measured is in the database."""


def stopping(tune_s: float, left_s: Callable[[], float], least_s: float) -> Callable[[str, int, int], None]:
    """An observer that stops tuning, counted from when measuring begins: capturing a net and reading rows may take as long.

    Args:
        tune_s: seconds that measuring may take.
        left_s: seconds that are left of the whole run.
        least_s: seconds that must be left when measuring is done.
    """
    begun: list[float] = []

    def watch(message: str, done: int, total: int) -> None:
        if not total or done >= total:
            return
        if not begun:
            begun.append(time.monotonic())
        if time.monotonic() - begun[0] > tune_s or left_s() < least_s:
            raise OutOfTimeError(f"{message}: {done} of {total}")

    return watch
