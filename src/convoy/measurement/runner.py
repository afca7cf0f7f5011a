"""Who measures: this process, a child process that may crash or hang, or stored rows without any device.

All three answer the same call, so that the search does not know which one it drives.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol as Interface

import torch

from convoy.engines.manifest import load_engine
from convoy.measurement.candidate import Bench, Failure, Ready, prepare
from convoy.measurement.protocol import Protocol
from convoy.measurement.statistics import median_and_spread
from convoy.measurement.timer import first_run_us, time_rounds
from convoy.perfdb.row import Measurement, Status
from convoy.problem import EngineConfig, Problem
from convoy.target import Target


@dataclass(frozen=True, slots=True)
class Request:
    """Measure some configs on one problem, against each other."""

    problem: Problem
    configs: tuple[EngineConfig, ...]
    rounds: int


class Runner(Interface):
    """Measures requests; rows come as they are found, in any order, one for each config."""

    def measure(self, request: Request, protocol: Protocol) -> Iterator[Measurement]:
        """The rows of a request."""
        ...

    def close(self) -> None:
        """Give back whatever was started."""
        ...


class InProcessRunner:
    """Measures in this process: a candidate that crashes or hangs takes the process with it.

    Args:
        target: the device.
        extra_engines: extra engines as `id=module:Class`.
        timeout_s: unused here; only a child can be ended from outside.
        announce: told the index of the config that is being prepared, before it is; -1 when timing starts.
    """

    def __init__(
        self, target: Target, *, extra_engines: tuple[str, ...] = (), timeout_s: float = 0.0, announce=None
    ) -> None:
        del timeout_s
        self.target = target
        self.extra_engines = extra_engines
        self._announce = announce or (lambda _: None)

    def measure(self, request: Request, protocol: Protocol) -> Iterator[Measurement]:
        """Check every config, prune the slow ones after one run, time the rest in interleaved rounds."""
        with torch.no_grad():
            yield from self._measure(request, protocol)

    def close(self) -> None:
        """Nothing was started."""

    def _measure(self, request: Request, protocol: Protocol) -> Iterator[Measurement]:
        bench = Bench(request.problem, self.target)
        ready: list[tuple[Ready, float]] = []
        best = float("inf")
        for index, config in enumerate(request.configs):
            self._announce(index)
            try:
                candidate = prepare(bench, config, self.extra_engines, cold=protocol.cold)
                once = first_run_us(candidate.launch, self.target.device)
            except Failure as failure:
                yield self.row(request.problem, config, protocol, failure.status, reason=failure.reason)
                continue
            except (torch.OutOfMemoryError, MemoryError) as error:
                yield self.row(request.problem, config, protocol, Status.OUT_OF_MEMORY, reason=str(error)[:500])
                continue
            except RuntimeError as error:
                yield self.row(request.problem, config, protocol, Status.LAUNCH_ERROR, reason=str(error)[:500])
                continue
            best = min(best, once)
            ready.append((candidate, once))
        self._announce(-1)
        slow = [(c, once) for c, once in ready if once > protocol.prune * best and len(ready) > 1]
        for candidate, once in slow:
            yield self._ok(request.problem, candidate, protocol, [once])
        kept = [c for c, once in ready if not (once > protocol.prune * best and len(ready) > 1)]
        if kept:
            launches = [candidate.launch for candidate in kept]
            for candidate, samples in zip(
                kept, time_rounds(launches, protocol, request.rounds, self.target.device), strict=True
            ):
                yield self._ok(request.problem, candidate, protocol, samples)

    def _ok(self, problem: Problem, candidate: Ready, protocol: Protocol, samples: Sequence[float]) -> Measurement:
        median, spread = median_and_spread(samples)
        return self.row(
            problem,
            candidate.config,
            protocol,
            Status.OK,
            samples=len(samples),
            median_us=median,
            spread_us=spread,
            error=candidate.error,
            workspace_bytes=candidate.executable.workspace_bytes,
            resident_bytes=candidate.resident_bytes,
            deterministic=candidate.executable.deterministic,
        )

    def row(self, problem: Problem, config: EngineConfig, protocol: Protocol, status: Status, **values) -> Measurement:
        """A row of this target, now."""
        return row(self.target, problem, config, protocol, status, **values)


def row(
    target: Target, problem: Problem, config: EngineConfig, protocol: Protocol, status: Status, **values
) -> Measurement:
    """A row with the target's digest and versions and the present time."""
    return Measurement(
        problem=problem.key,
        config=config,
        target=target.digest,
        protocol=protocol.id,
        status=status,
        versions=" ".join(f"{name}={version}" for name, version in target.versions),
        date=dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        **values,
    )


class ReplayRunner:
    """Answers from stored rows, so that the search can be tested without a device; unknown configs are `unsupported`."""

    def __init__(self, rows: Sequence[Measurement]) -> None:
        self._rows = {(row.problem, row.config): row for row in rows}
        self.asked: list[tuple[str, EngineConfig]] = []

    def measure(self, request: Request, protocol: Protocol) -> Iterator[Measurement]:
        """The stored rows of the request's configs."""
        for config in request.configs:
            self.asked.append((request.problem.key, config))
            known = self._rows.get((request.problem.key, config))
            yield known or Measurement(
                request.problem.key, config, "", protocol.id, Status.UNSUPPORTED, reason="no stored row"
            )

    def close(self) -> None:
        """Nothing was started."""


def is_candidate(engine: str, extra: tuple[str, ...]) -> bool:
    """Whether an engine may be chosen: the oracle may not."""
    return load_engine(engine, extra).family != "reference"
