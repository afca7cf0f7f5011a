"""ChildRunner: measures in a child process with a time limit, so that a crash or a hang costs a row and not the session."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from convoy.errors import LaunchError
from convoy.measurement.device.memory_limit import MemoryLimit
from convoy.measurement.processes.builders import ONE_COMPILER, BuilderPool, builder_pools
from convoy.measurement.processes.process import START_S, WorkerEndedError, WorkerProcess, worker_handshake
from convoy.measurement.processes.worker import config_fields, problem_fields
from convoy.measurement.protocol import Protocol
from convoy.measurement.runner import Request, measurement_row
from convoy.perfdb.record import read_record
from convoy.perfdb.row import Measurement, Status
from convoy.problem import EngineConfig
from convoy.target import Target

DATA_S: Final = 300.0
"""Time for a problem's data and its float64 oracle, which no candidate is to blame for."""

MAX_LOST_FRACTION: Final = 0.2
"""Of the room that a worker has for tensors: when it has lost so much since its first request, a fresh one goes on, for a context
never gives back what the code of kernels takes, nor, with newer versions of PyTorch, a recording that failed what it had."""


@dataclass(frozen=True, slots=True)
class _End:
    """How a worker ended in the middle of a request.

    Attributes:
        config: the candidate that was being built or run; None: none was.
        status: status of its row; None: nobody is to blame who has not got a row.
        reason: reason of its row.
        sure: whether it is to blame beyond doubt: it ran out of time, or it was alone in a fresh process.
    """

    config: EngineConfig | None
    status: Status | None
    reason: str
    sure: bool


class ChildRunner:
    """Drives one worker; it starts with the first request and again after a fault.

    A candidate that runs out of time is recorded as `timeout`. When the worker dies, the candidate that was at work is
    measured again alone in a fresh worker before it gets the blame, because another one may have spoilt the memory before.

    Args:
        target: the device.
        extra_engines: extra engines as `id=module:Class`.
        timeout_s: most seconds for a candidate to be built and checked, and for each of its timed samples.
        memory_bytes: most bytes of a GPU for child and builders, contexts included; None: all that are free.
    """

    def __init__(
        self,
        target: Target,
        *,
        extra_engines: tuple[str, ...] = (),
        timeout_s: float = 30.0,
        memory_bytes: int | None = None,
    ) -> None:
        self.target = target
        self.extra_engines = extra_engines
        self.timeout_s = timeout_s
        self.memory_bytes = memory_bytes
        self.starts = 0
        """Workers started so far."""
        self._worker: WorkerProcess | None = None
        self._fresh = False
        self._lost: float | None = None
        """Share of its room that the worker had lost after its first request."""
        self._builders: list[BuilderPool] = []

    def prepare(self, requests: Sequence[Request]) -> None:
        """On a GPU, begin to compile the requests' kernels in other processes; elsewhere nothing is to be gained."""
        if self.target.device != "cuda":
            return
        if not self._builders:
            self._builders = builder_pools(self.target, self.extra_engines, self.timeout_s, self.memory_bytes)
        for builders in self._builders:
            builders.submit(requests)

    def is_ready(self, request: Request) -> bool:
        """Whether all that was begun for it is built."""
        return all(builders.is_built(request) for builders in self._builders)

    def measure(self, request: Request, protocol: Protocol) -> Iterator[Measurement]:
        """The rows of a request; a candidate that ends the worker gets a failure row, and a new worker goes on.

        Raises:
            LaunchError: no worker can be started.
        """
        for builders in self._builders:
            builders.wait(request)
        pending = list(request.configs)
        suspect: EngineConfig | None = None
        data_failures = 0
        while pending:
            end = yield from self._serve(request, [suspect] if suspect else pending, protocol, pending)
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
    ) -> Iterator[Measurement]:
        """Send configs to the worker and hand on its rows; rows leave `pending`. Returns an `_End`, or None if all went well.

        The worker is ended if this generator is left early: it would go on with a request that nobody waits for.
        """
        worker = self._started()
        sent = list(configs)
        alone = self._fresh and len(sent) == 1
        self._fresh = False
        worker.send(_job(request, sent, protocol))
        at, limit_s, lost, whole, tired = -1, DATA_S, False, False, False
        try:
            while True:
                message = worker.receive(limit_s)
                if "at" in message:
                    at = message["at"]
                    limit_s = self.timeout_s if at >= 0 else max(DATA_S, self.timeout_s)
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
                    tired = self._is_tired(message["gone"])
                    return None
        except TimeoutError as error:
            what = "the test data" if at < 0 else "it"
            return _End(sent[at] if at >= 0 else None, Status.TIMEOUT, f"{what} {error}", sure=True)
        except WorkerEndedError as error:
            if lost or (at >= 0 and sent[at] not in pending):  # whoever did it has its row
                return _End(None, None, "", sure=True)
            status = Status.OUT_OF_MEMORY if error.killed else Status.LAUNCH_ERROR
            hint = " (the system ends processes when memory is short)" if error.killed else ""
            return _End(sent[at] if at >= 0 else None, status, f"{error}{hint}", sure=alone)
        finally:
            if not whole or tired:
                self._end_worker()

    def _is_tired(self, lost: float) -> bool:
        """Whether the worker has lost too much of its room, and had not with its first request."""
        if self._lost is None:
            self._lost = lost
        return lost - self._lost > MAX_LOST_FRACTION

    def _started(self) -> WorkerProcess:
        if self._worker is not None:
            return self._worker
        threads = {"OMP_NUM_THREADS": str(self.target.units)} if self.target.device == "cpu" else {}
        limit = self.memory_bytes
        room = None if limit is None or self.target.device == "cpu" else MemoryLimit.of_measuring(limit)
        hello = worker_handshake(self.target, self.extra_engines, self.timeout_s, role="measure", room=room)
        self._worker = WorkerProcess(hello, {**threads, **ONE_COMPILER})
        self.starts += 1
        self._fresh = True
        try:
            self._worker.receive(START_S)
        except BaseException as error:
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
