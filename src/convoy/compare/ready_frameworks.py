"""ReadyFrameworks: frameworks that are ready and wait for their turn, as long as there is memory for them."""

from __future__ import annotations

import dataclasses
import threading
from typing import Final

from convoy.compare.case import Case
from convoy.compare.child_processes import ChildProcesses
from convoy.compare.child_session import ChildSession
from convoy.compare.limits import Limits
from convoy.compare.progress import SHORT, RunProgress
from convoy.compare.runs.manifest import ask_gpu
from convoy.compare.samples import settled

ALIVE_SHARE: Final = {"cpu": 0.5, "cuda": 0.8}
"""Share of the memory that frameworks which wait for their turn may have together; beyond it the earlier ones are ended, and
their figures stay those that they got alone. A GPU's next framework that finds too little left is begun again without them."""


class ReadyFrameworks:
    """Child processes that are built and wait to be timed, by framework.

    Args:
        limits: the memory that there is.
        children: ends the processes.
        progress: where their rows are.
    """

    def __init__(self, limits: Limits, children: ChildProcesses, progress: RunProgress) -> None:
        self._limits, self._children, self._progress = limits, children, progress
        self._lock = threading.Lock()
        self.alive: dict[str, ChildSession] = {}

    def add(self, name: str, child: ChildSession) -> None:
        """Let one wait."""
        with self._lock:
            self.alive[name] = child

    def exceeds_memory_share(self, device: str) -> bool:
        """Whether they have more than their share of the memory."""
        share = ALIVE_SHARE[device]
        if device == "cpu":
            used = sum(child.resident_bytes for child in self.alive.values())
            return used > share * self._limits.memory_bytes
        words = ask_gpu("memory.used", "memory.total", units=False)
        return bool(words) and float(words[0]) > share * float(words[1])

    def release(self, short: Case | None = None) -> None:
        """End the processes that wait. Where memory is short for a case, the figures that they got alone are final."""
        with self._lock:
            ended, self.alive = self.alive, {}
            for name, child in ended.items():
                self._children.end(child)
                row = self._progress.row(short, name) if short is not None else None
                if row is not None and row.ok and row.detail.get("timed") == "alone":
                    self._progress.keep(dataclasses.replace(row, detail={**settled(row.detail), SHORT: True}))
