"""Compiles a plan's kernels in several processes, if compiling them one by one would take long.

The compilers' caches are empty for a plan that comes from a file or from rows of another day: its kernels compile one after
another, a second or more each. The builders fill the caches on disk before this process needs the kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Final, Self

from convoy.measurement.processes.builders import BuilderPool, builder_pools
from convoy.measurement.processes.threaded_builds import BegunBuilds, BuildItem
from convoy.measurement.runner import Request
from convoy.settings import Settings
from convoy.target import Target
from convoy.tuning_profile import phase

WORTHWHILE_S: Final = 20.0
"""Builders start only if building here takes longer. With full caches, where nothing was left to compile, they took 19.6 and
22.3 s for the training steps of GoogLeNet and ResNet-50 (H100 machine, 16 cores)."""


class ParallelCompile:
    """Builders that start when they are first worth it, and end with the `with` block.

    Args:
        target: the target to compile for; on a CPU nothing is done.
        settings: `isolate` allows further processes; `engines` and `timeout_s` are passed to the builders.
        begun: builds that threads of this process have begun.

    Attributes:
        begun: as given; those that were taken are out.
    """

    def __init__(self, target: Target, settings: Settings, begun: BegunBuilds | None = None) -> None:
        self.begun: BegunBuilds = {} if begun is None else begun
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
        """Compile everything and wait. A build that fails is met again, with its reason, when this process builds.

        Args:
            wanted: the builds that are left.
            each_s: seconds that one build took in this process so far.

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
        with phase("build", "in other processes"):
            for pool in self._pools:
                for request in requests:
                    pool.wait(request)
        return True
