"""Compiles a plan's kernels in several processes, if compiling them one by one would take long.

The compilers' caches are empty for a plan that comes from a file or from rows of another day: its kernels compile one after
another, a second or more each. The builders fill the caches on disk before this process needs the kernels.
"""

from __future__ import annotations

import importlib
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from statistics import median_low
from types import TracebackType
from typing import Final, Self

from convoy.engines.manifest import load_engine
from convoy.measurement.processes.builder_servers import INDUCTOR, BuilderServers
from convoy.measurement.processes.builders import JOBS_PER_BUILDER, BuilderPool, builder_pools
from convoy.measurement.processes.threaded_builds import BegunBuilds, BuildItem
from convoy.measurement.processes.worker_server import can_fork
from convoy.measurement.runner import Request
from convoy.settings import Settings
from convoy.target import Target, usable_cores
from convoy.tuning_profile import phase

WORTHWHILE_S: Final = 20.0
"""Builders start only if building here takes longer. With full caches, where nothing was left to compile, they took 19.6 and
22.3 s for the training steps of GoogLeNet and ResNet-50 (H100 machine, 16 cores)."""

FEWEST_BUILDS: Final = 12
"""Builds for which builders begin before it is known whether they are needed. The server of builders imports for 3 s, and in less
than that this process compiles eight of Triton's kernels (ResNet-18's first answer: 1.9 s on an H200's machine, 16 cores)."""

FEWEST_ON_DEVICE: Final = JOBS_PER_BUILDER + 1
"""The same for builds that need the GPU: Inductor compiles a subgraph for a second or two."""

FEWEST_CORES: Final = 4
"""Cores with which builders begin before it is known whether they are needed. With fewer, the caller's own work would wait."""


def begins_early(target: Target, settings: Settings) -> bool:
    """Whether builders may begin before it is known that they are needed: where they do not take the caller's cores."""
    return target.device == "cuda" and settings.isolate and can_fork() and usable_cores() >= FEWEST_CORES


class ParallelCompile:
    """Builders that start when they are first worth it, and end with the `with` block.

    Args:
        target: the target to compile for; on a CPU nothing is done.
        settings: `isolate` allows further processes; `engines` and `timeout_s` are passed to the builders.

        servers: where builders are forked from; None: servers of its own.

    Attributes:
        begun: builds that threads of this process have begun; those that were taken are out.
    """

    def __init__(self, target: Target, settings: Settings, servers: BuilderServers | None = None) -> None:
        self.begun: BegunBuilds = {}
        self._target, self._settings, self._servers = target, settings, servers
        self._allowed = target.device == "cuda" and settings.isolate
        self._pools: list[BuilderPool] = []
        self._begun_elsewhere = False
        self._took: dict[str, list[float]] = {}
        self._begun_build: tuple[str, float] = "", 0.0
        self._importing: threading.Thread | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pool in self._pools:
            pool.close()
        if self._importing is not None:
            self._importing.join()

    def begin(self, wanted: Sequence[BuildItem]) -> None:
        """Begin to compile in other processes, while the caller does something else.

        Args:
            wanted: builds of the plan. So few that this process is done sooner are left to it.
        """
        if not begins_early(self._target, self._settings):
            return
        requests: dict[bool, list[Request]] = {False: [], True: []}
        for problem, config in dict.fromkeys(wanted):
            on_device = load_engine(config.engine, self._settings.engines).builds_on_device
            requests[on_device].append(Request(problem, (config,), 1))
        for pool, fewest in zip(self._all_pools(), (FEWEST_BUILDS, FEWEST_ON_DEVICE), strict=False):
            if len(requests[pool.on_device]) >= fewest:
                begun = requests[pool.on_device][::-1]  # this process will start with the first
                pool.submit(begun)
                self._begun_elsewhere = True
                if pool.on_device and self._importing is None:
                    self._importing = threading.Thread(target=_import_inductor, daemon=True)
                    self._importing.start()

    def _all_pools(self) -> list[BuilderPool]:
        if not self._pools:
            limit = self._settings.tuning_memory_bytes
            self._pools = builder_pools(
                self._target, self._settings.engines, self._settings.timeout_s, limit, self._servers
            )
        return self._pools

    def build(self, wanted: Sequence[BuildItem], each_s: float) -> bool:
        """Compile everything and wait. A build that fails is met again, with its reason, when this process builds.

        What `begin` has begun is not begun again: the caller's next build alone is waited for, if a builder is at it. One that no
        builder has come to is the caller's.

        The caller asks before each build, so the time from one call to the next is that of a build.

        Args:
            wanted: the builds that are left; the first is the caller's next.
            each_s: seconds that one build took in this process lately.

        Returns:
            Whether it was worth it, and was done.
        """
        if self._importing is not None:
            self._importing.join()
        if self._begun_elsewhere:
            for problem, config in wanted[:1]:
                self._wait_or_withdraw(Request(problem, (config,), 1))
            if len(wanted) == 1:  # builders take a second to end, which the caller's next work hides
                for pool in self._pools:
                    pool.dismiss()
            return False
        left_s = max(each_s * len(wanted), self._left_s(wanted))
        if not self._allowed or left_s < WORTHWHILE_S:
            return False
        requests = [Request(problem, (config,), 1) for problem, config in wanted]
        for pool in self._all_pools():
            pool.submit(requests)
        self._wait_for(requests)
        return True

    def _wait_or_withdraw(self, request: Request) -> None:
        for pool in self._pools:
            if not pool.withdraw(request) and not pool.is_built(request):
                with phase("build", "in other processes"):
                    pool.wait(request)

    def _wait_for(self, requests: Sequence[Request]) -> None:
        with phase("build", "in other processes"):
            for pool in self._pools:
                for request in requests:
                    pool.wait(request)

    def _left_s(self, wanted: Sequence[BuildItem]) -> float:
        """Seconds that this process would need for the builds. An engine with fewer than two timed builds counts as none.

        Builds of libraries take no time and lie between those that compile: a mean over all would not show what is left. An
        engine's first build also imports its compiler: one build says nothing, and of two the shorter counts.
        """
        engine, start = self._begun_build
        now = time.monotonic()
        if engine:
            self._took.setdefault(engine, []).append(now - start)
        self._begun_build = (wanted[0][1].engine if wanted else ""), now
        left = Counter(config.engine for _, config in wanted)
        return sum(
            count * median_low(self._took[name]) for name, count in left.items() if len(self._took.get(name, ())) > 1
        )


def _import_inductor() -> None:
    """Import PyTorch's compiler, which this process loads the built code with, while it waits for the GPU."""
    for name in INDUCTOR:
        with suppress(Exception):  # whatever it is, the build that needs the compiler meets it again
            importlib.import_module(name)
