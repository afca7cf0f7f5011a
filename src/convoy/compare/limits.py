"""Limits of a framework: time, memory, rounds, how many are built at the same time, and whether they are profiled."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from typing import Final

from convoy.compare.process_memory import available_bytes

ROUNDS: Final = 15
"""Interleaved rounds: an odd number, so that the median is a sample."""

MEMORY_SHARE: Final = 0.9
"""Share of the memory that is available at the start that one framework may use, unless a limit is given."""

CORES_A_FRAMEWORK: Final = 3
"""Cores for each framework that is built beside others on a GPU: compilers use several."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a framework.

    Attributes:
        timeout_s: most seconds for each of its steps (start, one way built and checked, one round).
        memory_bytes: most resident bytes; 0: `MEMORY_SHARE` of the available memory.
        rounds: interleaved rounds.
        seconds: when they are over nothing new is begun; 0: there is time.
        jobs: frameworks that are built side by side; 0: one on a CPU, on a GPU as many as the cores are good for.
        cases: cases whose frameworks are built side by side on a GPU; they are timed one by one.
        profile: whether each framework's time by layer kind is taken, which needs seconds of a profiler.
    """

    timeout_s: float = 900.0
    memory_bytes: int = 0
    rounds: int = ROUNDS
    seconds: float = 0.0
    jobs: int = 0
    cases: int = 1
    profile: bool = True

    def builders(self, device: str) -> int:
        """How many frameworks are built side by side."""
        return self.jobs or (max(1, (os.cpu_count() or 1) // CORES_A_FRAMEWORK) if device == "cuda" else 1)

    def on_this_machine(self) -> Limits:
        """The same with the memory that there is now, where no limit is given."""
        return dataclasses.replace(self, memory_bytes=self.memory_bytes or int(available_bytes() * MEMORY_SHARE))
