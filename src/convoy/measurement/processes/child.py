"""ChildRunner: measures in a child process with a time limit, so that a crash or a hang costs one row, not the session."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from convoy.deadline import Deadline
from convoy.engines.manifest import load_engine
from convoy.errors import LaunchError
from convoy.measurement.device.memory_limit import MemoryLimit
from convoy.measurement.processes.builder_servers import ONE_COMPILER
from convoy.measurement.processes.builders import POLL_S, BuilderPool, builder_pools
from convoy.measurement.processes.process import START_S, WorkerEndedError, WorkerProcess, worker_handshake
from convoy.measurement.processes.worker import config_fields, problem_fields
from convoy.measurement.protocol import Protocol
from convoy.measurement.runner import Request, measurement_row
from convoy.perfdb.record import read_record
from convoy.perfdb.row import Measurement, Status
from convoy.problem import EngineConfig
from convoy.target import Target
from convoy.tuning_profile import phase

DATA_S: Final = 300.0
"""Time limit for a problem's data and its float64 oracle, for which no candidate is responsible."""

MAX_LOST_FRACTION: Final = 0.2
"""Share of a worker's tensor memory. When it has lost more since its first request, a new worker replaces it: a context never
frees the memory of loaded kernels, nor, with newer versions of PyTorch, the memory of a failed capture."""


@dataclass(frozen=True, slots=True)
class _WorkerEnd:
    """How a worker ended during a request.

    Attributes:
        config: the candidate that was being built or run; None: none was.
        status: status of its row; None: the responsible candidate already has its row.
        reason: reason of its row.
        sure: whether that candidate is certainly responsible: it timed out, or it was alone in a new process.
    """

    config: EngineConfig | None
    status: Status | None
    reason: str
    sure: bool


class _TimeUpError(Exception):
    """The time of the whole call is up."""


class ChildRunner:
    """Drives one worker, which starts with the first request and again after a fault.

    A candidate that runs out of time is recorded as `timeout`. If the worker dies, the candidate that was running is measured
    again alone in a new worker before it is blamed, because an earlier candidate may have corrupted the memory.

    Args:
        target: the device.
        extra_engines: extra engines as `id=module:Class`.
        timeout_s: most seconds for building and checking a candidate, and for each of its timed samples.
        memory_bytes: most bytes of a GPU for child and builders, contexts included; None: all free memory.
        deadline: when the worker is ended amid a request; candidates that have no row by then get none. None: never.
    """

    def __init__(
        self,
        target: Target,
        *,
        extra_engines: tuple[str, ...] = (),
        timeout_s: float = 30.0,
        memory_bytes: int | None = None,
        deadline: Deadline | None = None,
    ) -> None:
        self.target = target
        self.extra_engines = extra_engines
        self.timeout_s = timeout_s
        self.memory_bytes = memory_bytes
        self._deadline = deadline or Deadline()
        self.starts = 0
        """Workers started so far."""
        self._worker: WorkerProcess | None = None
        self._is_new = False
        self._lost: float | None = None
        """Share of its memory limit that the worker had lost after its first request."""
        self._builders: list[BuilderPool] = []

    def prepare(self, requests: Sequence[Request]) -> None:
        """On a GPU, begin to compile the requests' kernels in other processes; on a CPU, do nothing."""
        if self.target.device != "cuda":
            return
        if not self._builders:
            self._builders = builder_pools(self.target, self.extra_engines, self.timeout_s, self.memory_bytes)
        for builders in self._builders:
            builders.submit(requests)

    def is_ready(self, request: Request) -> bool:
        """Whether all builds that were begun for the request have finished."""
        return all(builders.is_built(request) for builders in self._builders)

    def measure(self, request: Request, protocol: Protocol) -> Iterator[Measurement]:
        """The rows of a request. A candidate that ends the worker gets a failure row, and a new worker continues.

        Raises:
            LaunchError: no worker can be started.
        """
        with phase("build", "in other processes"):
            for builders in self._builders:
                builders.wait(request, self._deadline)
        if self._deadline.is_over:
            return
        pending = list(request.configs)
        suspect: EngineConfig | None = None
        data_failures = 0
        while pending:
            try:
                end = yield from self._serve(request, [suspect] if suspect else pending, protocol, pending)
            except _TimeUpError:
                return
            if end is None:
                suspect = None
            elif end.status is None:
                continue
            elif end.config is None:
                data_failures += 1
                if data_failures > 1:
                    for config in pending:
                        yield measurement_row(
                            self.target, request.problem, config, protocol, end.status, reason=end.reason
                        )
                    return
            elif end.sure:
                pending.remove(end.config)
                suspect = None
                yield measurement_row(self.target, request.problem, end.config, protocol, end.status, reason=end.reason)
            else:
                suspect = end.config

    def close(self) -> None:
        """End the worker and the builders."""
        self._end_worker()
        for builders in self._builders:
            builders.close()
        self._builders = []

    def _end_worker(self) -> None:
        worker, self._worker, self._lost = self._worker, None, None
        if worker is not None:
            worker.end()

    def _serve(
        self, request: Request, configs: list[EngineConfig], protocol: Protocol, pending: list[EngineConfig]
    ) -> Generator[Measurement, None, _WorkerEnd | None]:
        """Send configs to the worker and yield its rows; rows leave `pending`. Returns a `_WorkerEnd`, or None if all went well.

        The worker is ended if this generator is closed early, because it would continue a request whose rows nobody reads.
        """
        worker = self._started()
        sent = list(configs)
        alone = self._is_new and len(sent) == 1
        self._is_new = False
        worker.send(_job(request, sent, protocol))
        at, limit_s, lost, whole, worn_out = -1, DATA_S, False, False, False
        try:
            while True:
                message = self._received(worker, limit_s)
                if "at" in message:
                    at = message["at"]
                    limit_s = self._limit_s(sent[int(at)], message["phase"]) if at >= 0 else max(DATA_S, self.timeout_s)
                elif "row" in message:
                    row = read_record(message["row"])
                    pending.remove(row.config)
                    yield row
                elif "lost" in message:
                    lost = True
                elif "done" in message:
                    whole = not any(config in pending for config in sent)
                    if not whole:
                        raise LaunchError("the measuring process gave no row for a candidate")
                    worn_out = self._is_worn_out(message["gone"])
                    return None
        except TimeoutError as error:
            what = "the test data" if at < 0 else "it"
            return _WorkerEnd(sent[at] if at >= 0 else None, Status.TIMEOUT, f"{what} {error}", sure=True)
        except WorkerEndedError as error:
            if lost or (at >= 0 and sent[at] not in pending):  # the responsible candidate has its row
                return _WorkerEnd(None, None, "", sure=True)
            status = Status.OUT_OF_MEMORY if error.killed else Status.LAUNCH_ERROR
            hint = " (the system kills processes when memory is short)" if error.killed else ""
            return _WorkerEnd(sent[at] if at >= 0 else None, status, f"{error}{hint}", sure=alone)
        finally:
            if not whole or worn_out:
                self._end_worker()

    def _limit_s(self, config: EngineConfig, phase: str) -> float:
        """Most seconds for a phase of a candidate."""
        patience = load_engine(config.engine, self.extra_engines).build_patience if phase == "build" else 1.0
        return patience * self.timeout_s

    def _received(self, worker: WorkerProcess, limit_s: float) -> dict[str, Any]:
        """The worker's next message.

        Raises:
            TimeoutError: none came within `limit_s` seconds.
            _TimeUpError: the call's time ended first; no candidate is responsible.
        """
        allowed_s = limit_s
        while True:
            wait_s = min(limit_s, self._deadline.left_s, POLL_S)
            try:
                return worker.receive(wait_s)
            except TimeoutError:
                if self._deadline.is_over:
                    raise _TimeUpError from None
                limit_s -= wait_s
                if limit_s <= 0:
                    raise TimeoutError(f"took longer than {allowed_s:g} s") from None

    def _is_worn_out(self, lost: float) -> bool:
        """Whether the worker has lost too much of its memory since its first request."""
        if self._lost is None:
            self._lost = lost
        return lost - self._lost > MAX_LOST_FRACTION

    def _started(self) -> WorkerProcess:
        if self._worker is not None:
            return self._worker
        threads = {"OMP_NUM_THREADS": str(self.target.units)} if self.target.device == "cpu" else {}
        limit = self.memory_bytes
        memory_limit = None if limit is None or self.target.device == "cpu" else MemoryLimit.of_measuring(limit)
        hello = worker_handshake(
            self.target, self.extra_engines, self.timeout_s, role="measure", memory_limit=memory_limit
        )
        self._worker = WorkerProcess(hello, {**threads, **ONE_COMPILER})
        self.starts += 1
        self._is_new = True
        try:
            self._received(self._worker, START_S)
        except BaseException as error:  # everything, an interrupt too: no worker may be left
            self._end_worker()
            if isinstance(error, (TimeoutError, WorkerEndedError)):
                raise LaunchError(f"the measuring process did not start: {error}") from error
            raise
        return self._worker


def _job(request: Request, configs: Sequence[EngineConfig], protocol: Protocol) -> dict[str, Any]:
    return {
        **problem_fields(request.problem),
        "configs": [config_fields(config) for config in configs],
        "rounds": request.rounds,
        "best_us": request.best_us,
        "protocol": asdict(protocol),
    }
