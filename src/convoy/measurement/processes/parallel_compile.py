"""Ahead: compiles what a plan wants in several processes, where building it one by one would take long.

A plan that comes from rows of another day, or from a file, finds the compilers' caches empty: its kernels are compiled one after
another, a second or more each. What the builders compile lies in the caches on disk when this process asks for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Final, Self

from convoy.measurement.processes.builders import BuilderPool, builder_pools
from convoy.measurement.runner import Request
from convoy.problem import EngineConfig, Problem
from convoy.settings import Settings
from convoy.target import Target

WORTHWHILE_S: Final = 10.0
"""Builders are started for more than this: starting them takes five to eight seconds (H100 machine, 16 cores)."""

BuildItem = tuple[Problem, EngineConfig]
"""What is to be built: a problem's config."""


class ParallelCompile:
    """Builders that start when they are first worth it, and end with the `with` block.

    Args:
        target: what to compile for; on a CPU nothing is gained, and nothing is done.
        settings: `isolate` allows further processes; `engines` and `timeout_s` are the builders'.
    """

    def __init__(self, target: Target, settings: Settings) -> None:
        self._target, self._settings = target, settings
        self._allowed = target.device == "cuda" and settings.isolate
        self._pools: list[BuilderPool] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pool in self._pools:
            pool.close()

    def build(self, wanted: Sequence[BuildItem], each_s: float) -> bool:
        """Compile all that is wanted, and wait; a build that fails is met again, with its reason, by whoever wants it.

        Args:
            wanted: what is still to be built.
            each_s: seconds that one took so far in this process.

        Returns:
            Whether it was worth it, and was done.
        """
        if not self._allowed or each_s * len(wanted) < WORTHWHILE_S:
            return False
        if not self._pools:
            limit = self._settings.tuning_memory_bytes
            self._pools = builder_pools(self._target, self._settings.engines, self._settings.timeout_s, limit)
        requests = [Request(problem, (config,), 1) for problem, config in wanted]
        for pool in self._pools:
            pool.submit(requests)
        for pool in self._pools:
            for request in requests:
                pool.wait(request)
        return True
