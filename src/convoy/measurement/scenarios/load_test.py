"""All three scenarios of one net, within a given time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from convoy.measurement.scenarios.clock import Clock, VirtualClock
from convoy.measurement.scenarios.scenarios import (
    TRIALS,
    Answer,
    Latencies,
    ServerLoad,
    best_of,
    highest_load,
    offline,
    poisson_arrivals,
    server,
    single_stream,
    summarised,
)

SHARE: Final = 0.7
"""Of the offline throughput: the load at which the 99th percentile is reported."""

BOUND: Final = 3.0
"""The usual bound, as a multiple of the time of the largest batch."""

SIMULATED: Final = 3000
"""Queries of one simulated schedule."""


@dataclass(frozen=True, slots=True)
class BatchTime:
    """A program's full batches: size, milliseconds of one, samples a second."""

    batch: int
    batch_ms: float
    samples_per_s: float


@dataclass(frozen=True, slots=True)
class LoadTest:
    """Figures of a net.

    Attributes:
        batches: each program's, the smallest first.
        single_stream: one sample at a time, by the smallest program.
        offline_samples_per_s: of the best program.
        offline_batch: its batch size.
        share: the load of `server`, as a share of the offline throughput.
        server: that load.
        batch_multiple: its 99th percentile over the time of the largest batch.
        bound_ms: the bound on the 99th percentile, milliseconds.
        allowed: the highest load that was found to keep the bound; None: none of those that were tried.
        tried: all loads that were tried for it; none where one query alone takes longer than the bound.
        seed: of the schedules.
    """

    batches: tuple[BatchTime, ...]
    single_stream: Latencies
    offline_samples_per_s: float
    offline_batch: int
    share: float
    server: ServerLoad
    batch_multiple: float
    bound_ms: float
    allowed: ServerLoad | None
    tried: tuple[ServerLoad, ...]
    seed: int

    @property
    def fewest_queries(self) -> int:
        """Queries of the shortest schedule that a figure comes from."""
        loads = [self.server, *([self.allowed] if self.allowed is not None else [])]
        return min(load.latencies.queries for load in loads)


def simulated(rate: float, queries: int, seed: int, times: Mapping[int, float]) -> Latencies:
    """Latencies of a server whose batches always take the given seconds: no time passes."""
    clock = VirtualClock()
    arrivals = poisson_arrivals(rate, queries / rate, seed) or [0.0]
    return summarised(server(arrivals, lambda _, size: clock.advance(times[size]), times, clock))


def guessed_load(bound_ms: float, ceiling: float, seed: int, times: Mapping[int, float]) -> float:
    """The highest load that keeps a bound in the simulation, arrivals a second; at least a fiftieth of the ceiling."""
    low, high = 0.02 * ceiling, ceiling
    for _ in range(8):
        rate = (low + high) / 2
        low, high = (rate, high) if simulated(rate, SIMULATED, seed, times).p99_ms <= bound_ms else (low, rate)
    return low


def _server_load(
    rate: float,
    seconds: float,
    *,
    answer: Answer,
    times: Mapping[int, float],
    clock: Clock,
    bound_ms: float,
    seed: int,
) -> ServerLoad:
    """A schedule of so many arrivals a second, run."""
    arrivals = poisson_arrivals(rate, seconds, seed) or [0.0]
    found = summarised(server(arrivals, answer, times, clock))
    return ServerLoad(rate, found, found.p99_ms <= bound_ms)


def _tell(say: Callable[[str, int, int], object] | None, phrase: str, done: int) -> None:
    if say is not None:
        say(phrase, done, 3 + TRIALS)


def run_load_test(
    answer: Answer,
    sizes: Sequence[int],
    clock: Clock,
    *,
    seconds: float,
    bound_ms: float | None = None,
    seed: int = 0,
    say: Callable[[str, int, int], object] | None = None,
) -> LoadTest:
    """Run the scenarios.

    Args:
        answer: answers a batch; it is called once for each size before anything is timed.
        sizes: the programs' batch sizes.
        clock: the clock.
        seconds: that all of it takes, in about: schedules are as long, and the last batches end later.
        bound_ms: bound on the 99th percentile in milliseconds; by default `BOUND` times the time of the largest batch.
        seed: of the schedules.
        say: told about the progress: a phrase, the number of parts done, and of all parts.
    """
    ordered = sorted(sizes)
    tell = partial(_tell, say)
    for size in ordered:
        answer(size, size)
    tell("single stream", 0)
    stream = summarised(single_stream(answer, ordered[0], clock, seconds / 8))
    tell("offline", 1)
    times = {size: offline(answer, size, clock, seconds / 8 / len(ordered)) for size in ordered}
    batches = tuple(BatchTime(size, took * 1e3, size / took) for size, took in times.items())
    best = max(batches, key=lambda one: one.samples_per_s)
    bound = BOUND * batches[-1].batch_ms if bound_ms is None else bound_ms

    tell("server", 2)
    tried = partial(_server_load, answer=answer, times=times, clock=clock, bound_ms=bound, seed=seed)
    usual = tried(SHARE * best.samples_per_s, seconds / 8)
    loads: list[ServerLoad] = []

    def attempt(rate: float) -> ServerLoad:
        tell(f"server, {rate:.4g} arrivals a second", 3 + len(loads))
        loads.append(tried(rate, seconds * 5 / 8 / TRIALS))
        return loads[-1]

    if bound >= stream.p50_ms:  # else no load keeps it
        highest_load(attempt, guessed_load(bound, best.samples_per_s, seed, times), best.samples_per_s)
    return LoadTest(
        batches=batches,
        single_stream=stream,
        offline_samples_per_s=best.samples_per_s,
        offline_batch=best.batch,
        share=SHARE,
        server=usual,
        batch_multiple=usual.latencies.p99_ms / batches[-1].batch_ms,
        bound_ms=bound,
        allowed=best_of(loads),
        tried=tuple(loads),
        seed=seed,
    )
