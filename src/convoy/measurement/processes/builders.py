"""Compiles kernels in other processes before the measuring process builds them.

The builds are thrown away; the compilers' caches on disk (Triton's and Inductor's) keep their results.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from convoy.deadline import Deadline
from convoy.engines.manifest import load_engine
from convoy.measurement.device.memory_limit import CONTEXT_BYTES, MAX_DEVICE_BUILDERS, MemorySplit
from convoy.measurement.processes.builder_servers import NO_DEVICE, ONE_COMPILER, ONE_THREAD, BuilderServers
from convoy.measurement.processes.process import (
    START_S,
    Start,
    WorkerEndedError,
    WorkerProcess,
    spawn,
    worker_handshake,
)
from convoy.measurement.processes.worker import config_fields, problem_fields
from convoy.measurement.processes.worker_server import WorkerServer, can_fork
from convoy.measurement.runner import Request
from convoy.problem import EngineConfig
from convoy.target import Target, usable_cores
from convoy.tuning_profile import phase

MAX_BUILDERS: Final = 16
"""Each builder imports torch (about 0.5 GB of memory); a search requests hundreds of builds at a time, one second each."""

CONTEXT_FRACTION: Final = 0.05
"""Largest share of the GPU's memory for the contexts of all builders."""

JOBS_PER_BUILDER: Final = 4
"""Jobs for which one builder starts that imports everything itself: its start takes as long as three builds."""

POLL_S: Final = 0.25
"""How often a wait looks whether the call's time was ended early."""

_Key = tuple[str, EngineConfig]


@dataclass(frozen=True, slots=True)
class _Job:
    """One build: its problem's key and config, the message that asks for it, and most seconds that it may take."""

    key: _Key
    message: dict[str, Any]
    limit_s: float


def max_builders(target: Target, *, on_device: bool) -> int:
    """Processes that a pool may have: one per core except one, and on the device as many as contexts fit.

    Args:
        target: the device.
        on_device: whether the processes see the GPU.
    """
    cores = max(1, usable_cores() - 1)
    if not on_device:
        return min(MAX_BUILDERS, cores)
    return max(1, min(MAX_DEVICE_BUILDERS, cores, int(CONTEXT_FRACTION * target.memory_bytes / CONTEXT_BYTES)))


class BuilderPool:
    """Processes that build and throw away. If a build fails, hangs or crashes, measuring meets and records the same failure.

    A pool builds either for the engines that need a GPU to build (`Engine.builds_on_device`), or for all others. Builders for
    the others do not see the GPU, because each context would take GPU memory.

    Args:
        target: the target to compile for.
        extra_engines: extra engines as `id=module:Class`.
        timeout_s: a build that takes longer is given up.
        most: most processes; None: one less than there are cores, fewer on the device.
        on_device: whether its builders see the GPU.
        servers: where several builders are forked from: one that has started already is taken.

    Attributes:
        on_device: whether its builders see the GPU.
    """

    def __init__(
        self,
        target: Target,
        extra_engines: tuple[str, ...],
        timeout_s: float,
        most: int | None = None,
        *,
        on_device: bool = False,
        servers: BuilderServers | None = None,
    ) -> None:
        self.on_device = on_device
        self._target = target
        self._extra_engines = extra_engines
        self._timeout_s = timeout_s
        self._most = most or max_builders(target, on_device=on_device)
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._pending: set[_Key] = set()
        self._started: set[_Key] = set()
        self._seen: set[_Key] = set()
        self._threads: list[threading.Thread] = []
        self._workers: dict[int, WorkerProcess] = {}
        self._servers = servers or BuilderServers()
        self._server: WorkerServer | None = None
        self._closed = False

    def submit(self, requests: Sequence[Request]) -> None:
        """Begin to build, once each, the candidates of engines that compile (`Engine.trusted` is False)."""
        with self._changed:
            for job in self._new_jobs(requests):
                self._seen.add(job.key)
                self._pending.add(job.key)
                self._jobs.put(job)
            wanted = min(self._most, -(-len(self._pending) // JOBS_PER_BUILDER))
            if wanted > 1 and can_fork():
                self._server = self._server or self._servers.take(on_device=self.on_device)
                wanted = min(self._most, len(self._pending))  # a fork costs less than any build
        while len(self._threads) < wanted:
            thread = threading.Thread(target=self._work, args=(len(self._threads),), daemon=True)
            self._threads.append(thread)
            thread.start()

    def wait(self, request: Request, deadline: Deadline | None = None) -> None:
        """Wait until every build that was begun for a request has finished or was given up, or until the deadline."""
        keys = _keys(request)
        with self._changed:
            while not self._closed and not self._pending.isdisjoint(keys):
                if deadline is not None and deadline.is_over:
                    return
                self._changed.wait(None if deadline is None else min(POLL_S, deadline.left_s))

    def withdraw(self, request: Request) -> bool:
        """Take a request back, which the caller builds itself. False if a builder is at one of its builds, or all are done."""
        keys = _keys(request)
        with self._changed:
            left = self._pending & keys
            if not left or not self._started.isdisjoint(left):
                return False
            self._pending -= left
            return True

    def is_built(self, request: Request) -> bool:
        """Whether `wait` would return at once."""
        with self._changed:
            return self._closed or self._pending.isdisjoint(_keys(request))

    def dismiss(self) -> None:
        """Tell the builders to end if no build is left to them; waits for nothing. Later builds are the caller's."""
        with self._changed:
            workers = [] if self._pending else list(self._workers.values())
        for worker in workers:
            worker.terminate()

    def close(self) -> None:
        """End all builders."""
        with self._changed:
            self._closed = True
            workers = list(self._workers.values())
            self._changed.notify_all()
        for _ in self._threads:
            self._jobs.put(None)
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.kill()
        if self._server is not None:
            self._server.close()
        for thread in self._threads:
            thread.join()

    def _new_jobs(self, requests: Sequence[Request]) -> Iterator[_Job]:
        for request in requests:
            for config in request.configs:
                key = (request.problem.key, config)
                engine = load_engine(config.engine, self._extra_engines)
                if key not in self._seen and not engine.trusted and engine.builds_on_device == self.on_device:
                    message = {**problem_fields(request.problem), "config": config_fields(config)}
                    yield _Job(key, message, engine.build_patience * self._timeout_s)

    def _work(self, index: int) -> None:
        """The thread of one builder: starts its process, sends it jobs, and replaces it after a fault."""
        worker: WorkerProcess | None = None
        while (job := self._jobs.get()) is not None:
            try:
                if worker is None:
                    worker = self._start(index)
                if worker is not None and self._begins(job):
                    with phase("builder", job.key[1].engine):
                        worker.send(job.message)
                        worker.receive(job.limit_s)
            except (TimeoutError, WorkerEndedError):
                self._end(index)
                worker = None
            finally:
                with self._changed:
                    self._started.discard(job.key)
                    self._pending.discard(job.key)
                    self._changed.notify_all()
        self._end(index)

    def _begins(self, job: _Job) -> bool:
        """Whether a builder is to build it: nobody has withdrawn it."""
        with self._changed:
            if job.key in self._pending:
                self._started.add(job.key)
            return job.key in self._started

    def _start(self, index: int) -> WorkerProcess | None:
        """A builder that is ready: a forked one, or a new process if that fails. None after `close`."""
        if self._server is not None:
            try:
                with phase("builder", "start"):
                    return self._start_by(self._server.fork, index)
            except (TimeoutError, WorkerEndedError):
                self._end(index)
        with phase("builder", "start" if self._server is None else "start, as no fork worked"):
            return self._start_by(spawn, index)

    def _start_by(self, start: Start, index: int) -> WorkerProcess | None:
        hello = worker_handshake(self._target, self._extra_engines, self._timeout_s, role="build")
        environment = {**({} if self.on_device else NO_DEVICE), **ONE_THREAD, **ONE_COMPILER}
        if self._closed:
            return None
        worker = WorkerProcess(hello, environment, start=start)
        with self._changed:
            self._workers[index] = worker
        if self._closed:  # `close` has not seen it
            worker.end()
            return None
        worker.receive(START_S)
        return worker

    def _end(self, index: int) -> None:
        with self._changed:
            worker = self._workers.pop(index, None)
        if worker is not None:
            worker.end()


def builder_pools(
    target: Target,
    extra_engines: tuple[str, ...],
    timeout_s: float,
    limit: int | None,
    servers: BuilderServers | None = None,
) -> list[BuilderPool]:
    """A pool for each kind of engine.

    If the limit leaves no memory for contexts, engines that need the device build without a pool.

    Args:
        target: the target to compile for.
        extra_engines: extra engines as `id=module:Class`.
        timeout_s: a build that takes longer is given up.
        limit: bytes of the device that tuning may take, this process's own tensors included; None: all free memory.
        servers: where builders are forked from: servers that have started already are taken.
    """
    most = max_builders(target, on_device=True)
    if limit is not None:
        most = min(most, MemorySplit.of(limit, isolate=True).builders)
    pools = [BuilderPool(target, extra_engines, timeout_s, servers=servers)]
    if most:
        pools.append(BuilderPool(target, extra_engines, timeout_s, most, on_device=True, servers=servers))
    return pools


def _keys(request: Request) -> set[_Key]:
    return {(request.problem.key, config) for config in request.configs}
