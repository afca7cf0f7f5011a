"""Who measures: this process, a child process that may crash or hang, or stored rows without any device.

All answer the same calls, so that the search does not know which one it drives.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final
from typing import Protocol as Interface

import torch

from convoy.engines.manifest import BASELINE
from convoy.errors import LaunchError
from convoy.measurement.bench import Bench
from convoy.measurement.candidate import Ready, prepare
from convoy.measurement.failure import ContextLostError, Failure, failure_of, survive
from convoy.measurement.protocol import Protocol
from convoy.measurement.statistics import Timing, summarise_rounds
from convoy.measurement.timer import first_run_us, replayed_us, time_rounds
from convoy.perfdb.row import Measurement, Status
from convoy.problem import EngineConfig, Problem
from convoy.target import Target

PRUNE_SLACK_US: Final = 100.0
"""Differences below this are not worth pruning for, and a first run on a GPU holds the cost of its launch (tens of
microseconds), which a captured graph has not."""

HOST_US: Final = 5000.0
"""First runs of up to this may be slow by the host alone, and are looked at again without it."""

HELD_SHARE: Final = 0.25
"""Share of the device's memory that candidates may hold while they wait to be timed together."""

Announce = Callable[[int, str], None]
"""Told what begins: the config's index in the request (-1: none) and `data`, `build` or `time`."""


@dataclass(frozen=True, slots=True)
class Request:
    """Measure some configs on one problem, against each other.

    Attributes:
        problem: what is computed.
        configs: the candidates; the likely fast ones first, for the slow ones are pruned against what came before.
        rounds: samples to take of each.
        best_us: median of the best candidate known so far; 0: none.
    """

    problem: Problem
    configs: tuple[EngineConfig, ...]
    rounds: int
    best_us: float = 0.0


class Runner(Interface):
    """Measures requests."""

    def prepare(self, requests: Sequence[Request]) -> None:
        """Told what will be asked next, so that slow builds can be begun in parallel; may do nothing."""
        ...

    def is_ready(self, request: Request) -> bool:
        """Whether `measure` would begin at once, and not wait for builds."""
        ...

    def measure(self, request: Request, protocol: Protocol) -> Iterator[Measurement]:
        """One row for each config, as they are found, in any order. Failures are rows too.

        A generator that is closed early, or interrupted, leaves the runner usable.
        """
        ...

    def close(self) -> None:
        """Give back whatever was started."""
        ...


def stamp(
    target: Target, problem: Problem, config: EngineConfig, protocol: Protocol, status: Status, **values: Any
) -> Measurement:
    """A row with the target's digest and versions and the present time."""
    return Measurement(
        problem=problem.key,
        config=config,
        target=target.digest,
        protocol=protocol.id,
        status=status,
        versions=" ".join(f"{name}={version.replace(' ', '_')}" for name, version in target.versions),
        date=dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        **values,
    )


class InProcessRunner:
    """Measures in this process: a candidate that crashes or hangs takes the process with it.

    The data of the problem asked for last, and its candidates that were right, are kept for the next request.

    Args:
        target: the device.
        extra_engines: extra engines as `id=module:Class`.
        timeout_s: unused; only a child can be ended from outside.
        announce: told what begins.
    """

    def __init__(
        self,
        target: Target,
        *,
        extra_engines: tuple[str, ...] = (),
        timeout_s: float = 0.0,
        announce: Announce = lambda index, phase: None,  # noqa: ARG005
    ) -> None:
        del timeout_s
        self.target = target
        self.extra_engines = extra_engines
        self._announce = announce
        self._bench: Bench | None = None
        self._ready: dict[EngineConfig, Ready] = {}

    def prepare(self, requests: Sequence[Request]) -> None:
        """Nothing is begun early: there is one process."""

    def is_ready(self, request: Request) -> bool:
        """Always: whatever must be built is built by `measure`."""
        del request
        return True

    def measure(self, request: Request, protocol: Protocol) -> Iterator[Measurement]:
        """Check every config, prune the slow ones after one run, time the rest in interleaved rounds.

        Raises:
            LaunchError: a candidate broke the device's context, after its row was given; nothing more can be measured here.
        """
        try:
            yield from self._measure(request, protocol)
        except ContextLostError as lost:
            self.close()
            raise LaunchError(f"the device cannot be used any more in this process: {lost}") from lost

    def close(self) -> None:
        """Let go of data and candidates."""
        self._bench = None
        self._ready.clear()

    def _measure(self, request: Request, protocol: Protocol) -> Iterator[Measurement]:
        self._announce(-1, "data")
        try:
            bench = self._bench_for(request.problem)
        except Exception as error:  # e.g. no memory for the float64 oracle: every candidate's row says so
            failure = failure_of(error, Status.LAUNCH_ERROR)
            for config in request.configs:
                reason = f"test data could not be made: {failure.reason}"
                yield stamp(self.target, request.problem, config, protocol, failure.status, reason=reason)
            return
        best = request.best_us or float("inf")
        waiting: list[tuple[int, Ready]] = []
        for index, config in enumerate(request.configs):
            self._announce(index, "build")
            try:
                ready, once = self._first_run(bench, config, protocol, best)
            except Failure as failure:
                yield self._failed(request, config, protocol, failure)
                continue
            except ContextLostError as lost:
                yield self._failed(request, config, protocol, lost.failure)
                raise
            if config.engine != BASELINE and once > _too_slow(best, protocol):
                self._ready.pop(config, None)
                yield self._timed(request, ready, protocol, Timing(1, once, 0.0))
                continue
            best = min(best, once)
            waiting.append((index, ready))
            if sum(held.held_bytes for held in self._ready.values()) > HELD_SHARE * self.target.memory_bytes:
                yield from self._time(request, waiting, protocol)
                waiting = []
                self._ready.clear()
        yield from self._time(request, waiting, protocol)

    @torch.no_grad()
    def _bench_for(self, problem: Problem) -> Bench:
        if self._bench is None or self._bench.problem != problem:
            self._ready.clear()
            if self.target.device == "cuda":
                torch.cuda.empty_cache()  # the pools of graphs that are gone are nobody else's
            self._bench = Bench(problem, self.target, sibling=self._bench)
            self._bench.fill()
        return self._bench

    @torch.no_grad()
    def _first_run(self, bench: Bench, config: EngineConfig, protocol: Protocol, best_us: float) -> tuple[Ready, float]:
        """A candidate that is right, with the time of one run; of a second one where the first says that it is slow.

        A row of a pruned candidate stays: it should not rest on one moment in which something else used the machine, nor, where
        it will run in a graph, on what the host needs to launch it.
        """
        ready = self._ready.get(config)
        if ready is None:
            ready = prepare(bench, config, self.extra_engines)
            self._ready[config] = ready

        def run() -> float:
            return survive(lambda: first_run_us(ready.launch, self.target.device), self.target.device)

        once = run()
        if once <= _too_slow(best_us, protocol):
            return ready, once
        if protocol.clock == "graph" and once < HOST_US:
            return ready, survive(lambda: replayed_us(ready.launch), self.target.device)
        return ready, min(once, run())

    def _time(self, request: Request, group: list[tuple[int, Ready]], protocol: Protocol) -> Iterator[Measurement]:
        """Interleaved rounds; whoever fails meanwhile gets its row, and the others are timed again without it."""
        while group:
            current = 0

            def announce(position: int, group: list[tuple[int, Ready]] = group) -> None:
                nonlocal current
                current = position
                self._announce(group[position][0], "time")

            try:
                timings = self._rounds([ready for _, ready in group], request.rounds, protocol, announce)
            except Failure as failure:
                _, ready = group.pop(current)
                yield self._failed(request, ready.config, protocol, failure)
                continue
            except ContextLostError as lost:
                yield self._failed(request, group[current][1].config, protocol, lost.failure)
                raise
            for _, ready in group:
                yield self._timed(request, ready, protocol, timings[ready.config])
            return

    @torch.no_grad()
    def _rounds(
        self, group: list[Ready], rounds: int, protocol: Protocol, announce: Callable[[int], None]
    ) -> Mapping[EngineConfig, Timing]:
        launches = [ready.launch for ready in group]
        device = self.target.device
        if protocol.cold:
            for position, ready in enumerate(group):
                announce(position)
                survive(partial(ready.cool, whole=protocol.copies_whole), device)
        samples = survive(lambda: time_rounds(launches, protocol, rounds, device, announce), device)
        return summarise_rounds({ready.config: values for ready, values in zip(group, samples, strict=True)})

    def _failed(self, request: Request, config: EngineConfig, protocol: Protocol, failure: Failure) -> Measurement:
        self._ready.pop(config, None)
        return stamp(self.target, request.problem, config, protocol, failure.status, reason=failure.reason)

    def _timed(self, request: Request, ready: Ready, protocol: Protocol, timing: Timing) -> Measurement:
        return stamp(
            self.target,
            request.problem,
            ready.config,
            protocol,
            Status.OK,
            samples=timing.samples,
            median_us=timing.median_us,
            spread_us=timing.spread_us,
            error=ready.error,
            workspace_bytes=ready.executable.workspace_bytes,
            resident_bytes=ready.resident_bytes,
            deterministic=ready.executable.deterministic,
        )


def _too_slow(best_us: float, protocol: Protocol) -> float:
    """Time of a run from which a candidate is pruned."""
    return protocol.prune_ratio * best_us + PRUNE_SLACK_US


class ReplayRunner:
    """Answers from stored rows, so that the search can be tested without a device; unknown configs are `unsupported`.

    Attributes:
        asked: (problem key, config, rounds) of everything that was asked, in order.
        prepared: number of configs announced by `prepare`.
    """

    def __init__(self, rows: Sequence[Measurement]) -> None:
        self._rows = {(row.problem, row.config): row for row in rows}
        self.asked: list[tuple[str, EngineConfig, int]] = []
        self.prepared = 0

    def prepare(self, requests: Sequence[Request]) -> None:
        """Count what was announced."""
        self.prepared += sum(len(request.configs) for request in requests)

    def is_ready(self, request: Request) -> bool:
        """Always."""
        del request
        return True

    def measure(self, request: Request, protocol: Protocol) -> Iterator[Measurement]:
        """The stored rows of the request's configs."""
        for config in request.configs:
            self.asked.append((request.problem.key, config, request.rounds))
            known = self._rows.get((request.problem.key, config))
            yield known or Measurement(
                request.problem.key, config, "", protocol.id, Status.UNSUPPORTED, reason="no stored row"
            )

    def close(self) -> None:
        """Nothing was started."""
