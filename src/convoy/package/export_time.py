"""How `Settings.time_s` of an export is shared out among its programs; each is tuned, built and checked."""

from __future__ import annotations

from typing import Final

from convoy.deadline import Deadline

KEPT_SHARE: Final = 0.3
"""Of the time that is left, kept for capturing, building and checking, where nothing is known of a net yet."""

BUILD: Final = 2.0
"""Building and checking a program takes this many times as long as capturing it took (ResNet-18 and ResNet-50, two cores)."""


def time_for_plan(deadline: Deadline, waiting: int, captured_s: float = 0.0) -> Deadline:
    """When the tuning of the next program must end, so that the whole export ends in time.

    Args:
        deadline: that of the export.
        waiting: programs without a plan, this one included.
        captured_s: seconds that capturing this program took; 0: it is captured later.
    """
    if not deadline.is_limited:
        return deadline
    left_s = deadline.left_s
    later_s = KEPT_SHARE * left_s
    if captured_s:
        later_s = captured_s * (waiting - 1 + BUILD * waiting)
    return Deadline(max(0.0, left_s - later_s) / waiting)
