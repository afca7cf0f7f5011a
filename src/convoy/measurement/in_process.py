"""InProcessRunner: measures in this process; the measuring worker uses it too."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final

import torch

from convoy.engines.manifest import BASELINE
from convoy.errors import LaunchError
from convoy.measurement.candidate import PreparedCandidate, prepare
from convoy.measurement.device.memory_limit import refresh_memory_limit
from convoy.measurement.failure import ContextLostError, Failure, failure_of, is_out_of_memory, run_or_fail
from convoy.measurement.protocol import Protocol
from convoy.measurement.reference_data import ReferenceData, data_key
from convoy.measurement.runner import PhaseCallback, Request, measurement_row
from convoy.measurement.statistics import SampleSummary, summarise_rounds
from convoy.measurement.timer import first_run_us, replayed_us, time_rounds
from convoy.perfdb.row import Measurement, Status
from convoy.problem import EngineConfig, Problem
from convoy.target import Target

PRUNE_SLACK_US: Final = 100.0
"""Differences below this are not worth pruning for. On a GPU a first run includes the launch on the host (tens of
microseconds), which a captured graph does not."""

HOST_US: Final = 5000.0
"""First runs up to this time may be slow only on the host, and are timed again without it."""

AGAIN_US: Final = 50000.0
"""On a CPU, a slow candidate runs again for so long before it is pruned. Another program takes a core for some milliseconds at a
time, often twice in a row: a copy that takes 30 us was pruned for 8 ms (two cores of an EPYC 7003 beside other machines)."""

MAX_HELD_FRACTION: Final = 0.25
"""Share of the device's memory that candidates may hold until they are timed together."""


class InProcessRunner:
    """Measures in this process: a candidate that crashes or hangs takes the process with it.

    It keeps the data of the last problem, and its correct candidates, for the next request.

    Args:
        target: the device.
        extra_engines: extra engines as `id=module:Class`.
        timeout_s: unused; only a child process can be ended from outside.
        memory_bytes: most bytes that the process may hold on the device (`measurement.device.memory_limit`); None: no limit.
        announce: called with the phase that begins.
    """

    def __init__(
        self,
        target: Target,
        *,
        extra_engines: tuple[str, ...] = (),
        timeout_s: float = 0.0,
        memory_bytes: int | None = None,
        announce: PhaseCallback = lambda index, phase: None,  # noqa: ARG005
    ) -> None:
        del timeout_s
        self.target = target
        self._most_held = MAX_HELD_FRACTION * (memory_bytes or target.memory_bytes)
        self.extra_engines = extra_engines
        self._announce = announce
        self._bench: ReferenceData | None = None
        self._ready: dict[EngineConfig, PreparedCandidate] = {}
        self._at: EngineConfig | None = None
        self.idle_bytes = 0
        """Bytes of a GPU that PyTorch held when nothing was being measured last, between two problems."""

    def prepare(self, requests: Sequence[Request]) -> None:
        """Does nothing: there is only this process."""

    def is_ready(self, request: Request) -> bool:
        """Always True: `measure` builds everything itself."""
        del request
        return True

    def measure(self, request: Request, protocol: Protocol) -> Iterator[Measurement]:
        """Check every config, prune the slow ones after one run, and time the others in interleaved rounds.

        Raises:
            LaunchError: a candidate broke the device's context, after its row was yielded; this process can measure nothing
                more.
        """
        try:
            yield from self._measure(request, protocol)
        except ContextLostError as lost:
            assert self._at is not None
            yield self._failed(request, self._at, protocol, lost.failure)
            self.close()
            raise LaunchError(f"the device cannot be used any more in this process: {lost}") from lost

    def close(self) -> None:
        """Free data and candidates."""
        self._bench = None
        self._ready.clear()

    def _measure(self, request: Request, protocol: Protocol) -> Iterator[Measurement]:
        self._announce(-1, "data")
        try:
            bench = self._bench_for(request.problem)
        except Exception as error:  # e.g. no memory for the float64 oracle; every candidate gets a row that says so
            failure = failure_of(error, Status.LAUNCH_ERROR)
            for config in request.configs:
                reason = f"test data could not be made: {failure.reason}"
                yield measurement_row(self.target, request.problem, config, protocol, failure.status, reason=reason)
            return
        best = request.best_us or float("inf")
        waiting: list[tuple[int, PreparedCandidate]] = []
        for index, config in enumerate(request.configs):
            found = self._attempt(bench, index, config, protocol, best)
            if isinstance(found, Failure) and found.status is Status.OUT_OF_MEMORY and self._ready:
                yield from self._time(request, waiting, protocol)  # waiting candidates hold memory
                waiting = []
                self._ready.clear()
                self._empty_cache()
                found = self._attempt(bench, index, config, protocol, best)
            if isinstance(found, Failure):
                yield self._failed(request, config, protocol, found)
                continue
            once = found[1]
            if config.engine != BASELINE and once > _prune_limit_us(best, protocol):
                self._ready.pop(config, None)
                yield self._timed(request, found[0], protocol, SampleSummary(1, once, 0.0))
                continue
            best = min(best, once)
            waiting.append((index, found[0]))
            if sum(held.held_bytes(cold=protocol.cold) for held in self._ready.values()) > self._most_held:
                yield from self._time(request, waiting, protocol)
                waiting = []
                self._ready.clear()
        yield from self._time(request, waiting, protocol)

    def _empty_cache(self) -> None:
        if self.target.device == "cuda":
            torch.cuda.empty_cache()

    @torch.no_grad()
    def _bench_for(self, problem: Problem) -> ReferenceData:
        if self._bench is not None and self._bench.problem == problem:
            return self._bench
        sibling, self._bench = self._bench, None
        if sibling is not None and data_key(sibling.problem) != data_key(problem):
            sibling = None
        if sibling is not None:
            sibling.output_buffers.clear()
        self._ready.clear()
        self._empty_cache()  # memory pools of freed graphs are not reused
        if self.target.device == "cuda" and sibling is None:
            self.idle_bytes = torch.cuda.memory_reserved()
        refresh_memory_limit()
        try:
            return self._filled(ReferenceData(problem, self.target, sibling=sibling))
        except Exception as error:  # everything: out of memory has several types; any other error is raised again
            if sibling is None or not is_out_of_memory(error):
                raise
        sibling = None
        self._empty_cache()
        return self._filled(ReferenceData(problem, self.target))

    def _filled(self, bench: ReferenceData) -> ReferenceData:
        bench.fill()
        self._bench = bench
        return bench

    def _attempt(
        self, bench: ReferenceData, index: int, config: EngineConfig, protocol: Protocol, best_us: float
    ) -> tuple[PreparedCandidate, float] | Failure:
        """A candidate with the time of one run, or its failure."""
        self._begin(index, config, "build")
        try:
            return self._first_run(bench, config, protocol, best_us)
        except Failure as failure:
            self._ready.pop(config, None)
            return failure.bare()

    def _begin(self, index: int, config: EngineConfig, phase: str) -> None:
        self._at = config
        self._announce(index, phase)

    @torch.no_grad()
    def _first_run(
        self, bench: ReferenceData, config: EngineConfig, protocol: Protocol, best_us: float
    ) -> tuple[PreparedCandidate, float]:
        """A correct candidate with the time of one run; if it is slow, the least of further runs.

        A pruned candidate's row stays in the database, so it should not depend on a moment in which another program used the
        machine, nor, if it will run in a graph, on the launch time of the host.
        """
        ready = self._ready.get(config)
        if ready is None:
            ready = prepare(bench, config, self.extra_engines)
            self._ready[config] = ready

        def run() -> float:
            return run_or_fail(lambda: first_run_us(ready.launch, self.target.device), self.target.device)

        once = run()
        limit = _prune_limit_us(best_us, protocol)
        if once <= limit:
            return ready, once
        if protocol.clock == "graph" and once < HOST_US:
            return ready, run_or_fail(lambda: replayed_us(ready.launch), self.target.device)
        return ready, _least_of_more(once, run, limit, AGAIN_US if self.target.device == "cpu" else 0.0)

    def _time(
        self, request: Request, group: list[tuple[int, PreparedCandidate]], protocol: Protocol
    ) -> Iterator[Measurement]:
        """Time candidates in interleaved rounds. One that fails gets its row, and the others are timed again without it.

        If memory does not suffice to time all of them together, each half is timed by itself.
        """
        if not group:
            return
        current = 0

        def announce(position: int) -> None:
            nonlocal current
            current = position
            index, ready = group[position]
            self._begin(index, ready.config, "time")

        try:
            timings = self._rounds([ready for _, ready in group], request.rounds, protocol, announce)
        except Failure as error:
            failure = error.bare()
        else:
            for _, ready in group:
                yield self._timed(request, ready, protocol, timings[ready.config])
            return
        if failure.status is Status.OUT_OF_MEMORY and len(group) > 1:
            middle = len(group) // 2
            for half in (group[:middle], group[middle:]):
                self._release_copies(group)
                yield from self._time(request, half, protocol)
            return
        _, ready = group.pop(current)
        yield self._failed(request, ready.config, protocol, failure)
        yield from self._time(request, group, protocol)

    def _release_copies(self, group: Sequence[tuple[int, PreparedCandidate]]) -> None:
        """Free what candidates hold for timing."""
        for _, ready in group:
            ready.release_copies()
        self._empty_cache()

    @torch.no_grad()
    def _rounds(
        self, group: list[PreparedCandidate], rounds: int, protocol: Protocol, announce: Callable[[int], None]
    ) -> Mapping[EngineConfig, SampleSummary]:
        launches = [ready.launch for ready in group]
        device = self.target.device
        if protocol.cold:
            for position, ready in enumerate(group):
                announce(position)
                run_or_fail(partial(ready.make_copies, whole=protocol.copies_whole), device)
        samples = run_or_fail(lambda: time_rounds(launches, protocol, rounds, device, announce), device)
        return summarise_rounds({ready.config: values for ready, values in zip(group, samples, strict=True)})

    def _failed(self, request: Request, config: EngineConfig, protocol: Protocol, failure: Failure) -> Measurement:
        self._ready.pop(config, None)
        return measurement_row(self.target, request.problem, config, protocol, failure.status, reason=failure.reason)

    def _timed(
        self, request: Request, ready: PreparedCandidate, protocol: Protocol, timing: SampleSummary
    ) -> Measurement:
        return measurement_row(
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


def _least_of_more(first_us: float, run: Callable[[], float], limit_us: float, most_us: float) -> float:
    """The least of a run and at least one more: until one is within a limit, or all took `most_us`."""
    least = spent = first_us
    while True:
        took = run()
        least, spent = min(least, took), spent + took
        if least <= limit_us or spent >= most_us:
            return least


def _prune_limit_us(best_us: float, protocol: Protocol) -> float:
    """The time of one run from which a candidate is pruned."""
    return protocol.prune_ratio * best_us + PRUNE_SLACK_US
