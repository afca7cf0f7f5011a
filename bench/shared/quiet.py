"""Refuses to measure on a host where something else is at work."""

from __future__ import annotations

import os
import time
from pathlib import Path

from convoy.compare.runs.device_lock import others_at_work
from convoy.target import Target

MOST_CPU_SHARE = 0.1
"""Share of all cores that other processes may use while nothing of ours runs."""

LOOK_S = 1.0
"""Seconds over which the share is taken."""

_STAT = Path("/proc/stat")


def require_quiet(target: Target, *, beside: bool = False) -> None:
    """End the script where another process uses the GPU, or more than `MOST_CPU_SHARE` of the cores.

    Args:
        target: the device.
        beside: whether others may use the cores, as for other GPUs of the host.

    Raises:
        SystemExit: with the reason and what to do.
    """
    reason = (target.device == "cuda" and others_at_work(target)) or ("" if beside else busy_cores())
    if reason:
        raise SystemExit(f"not measured: {reason}. Figures would be worth little. Stop the other work, or wait for it.")


def busy_cores(look_s: float = LOOK_S, stat: Path = _STAT) -> str:
    """A line where other processes use more than `MOST_CPU_SHARE` of the cores, else an empty text; Linux alone."""
    before = _ticks(stat)
    time.sleep(look_s)
    after = _ticks(stat)
    if before is None or after is None or after[1] <= before[1]:
        return ""
    share = (after[0] - before[0]) / (after[1] - before[1])
    if share <= MOST_CPU_SHARE:
        return ""
    return f"other processes use {share:.0%} of the {os.cpu_count() or 1} cores"


def _ticks(stat: Path) -> tuple[int, int] | None:
    """Busy and all clock ticks of all cores since the host began."""
    try:
        words = stat.read_text(encoding="ascii").splitlines()[0].split()
    except (OSError, IndexError):
        return None
    ticks = [int(word) for word in words[1:9]]
    idle = ticks[3] + ticks[4]  # idle, and waiting for a disk
    return sum(ticks) - idle, sum(ticks)
