"""The scenarios of MLPerf Inference, on any clock and for any net that answers batches. Plain Python, no torch.

- **Single stream**: one sample at a time; the next query is issued when the answer is there.
- **Offline**: all samples are there at the beginning; the figure is samples a second.
- **Server**: samples arrive at random, by a Poisson process with a seed. Those that wait are answered together.

A query has one sample. Its latency in the server scenario counts from its scheduled arrival to the end of its batch, so time in
the queue counts, and a late generator cannot hide it.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from convoy.measurement.scenarios.clock import Clock

Answer = Callable[[int, int], None]
"""Answers samples: their number, and the batch size of the program that runs (not less). Returns when the answers are there."""

LEAST_QUERIES: Final = 100
"""Fewer have no 99th percentile: it would be their maximum."""

TRIALS: Final = 6
"""Loads that `highest_load` tries."""

STEP: Final = 0.8
"""Factor to the next load, until one keeps the bound and one does not."""


@dataclass(frozen=True, slots=True)
class Latencies:
    """Latencies of queries, in milliseconds.

    Attributes:
        queries: how many.
        p50_ms: median.
        p90_ms: 90th percentile, MLPerf's figure of a single stream.
        p99_ms: 99th percentile, MLPerf's bound of a server.
    """

    queries: int
    p50_ms: float
    p90_ms: float
    p99_ms: float


def summarised(latencies: Sequence[float]) -> Latencies:
    """Percentiles of at least one latency in seconds, by nearest rank: each is a latency that was measured."""
    ordered = sorted(latencies)

    def rank(share: float) -> float:
        return ordered[math.ceil(share * len(ordered)) - 1] * 1e3

    return Latencies(len(ordered), rank(0.5), rank(0.9), rank(0.99))


def poisson_arrivals(rate: float, seconds: float, seed: int) -> list[float]:
    """Times of arrival in the first `seconds`, ascending: a Poisson process of `rate` arrivals a second.

    Two rates with one seed draw the same numbers, so that a higher rate is the same schedule, faster.
    """
    draw = random.Random(seed)
    return list(itertools.takewhile(lambda time: time < seconds, itertools.accumulate(_gaps(draw, rate))))


def _gaps(draw: random.Random, rate: float) -> Generator[float]:
    while True:
        yield draw.expovariate(1.0) / rate


def single_stream(answer: Answer, size: int, clock: Clock, seconds: float) -> list[float]:
    """Latencies of queries one after another, in seconds.

    Args:
        answer: answers a batch.
        size: the program's batch size; a query fills one place of it.
        clock: the clock.
        seconds: when no further query is issued; at least one is.
    """
    found: list[float] = []
    begun = now = clock.now()
    while not found or now - begun < seconds:
        answer(1, size)
        now, before = clock.now(), now
        found.append(now - before)
    return found


def offline(answer: Answer, size: int, clock: Clock, seconds: float) -> float:
    """Seconds of a full batch, in the mean of as many as fit into `seconds`, and at least one."""
    begun, batches = clock.now(), 0
    while not batches or clock.now() - begun < seconds:
        answer(size, size)
        batches += 1
    return (clock.now() - begun) / batches


def batch_for(waiting: int, times: Mapping[int, float]) -> int:
    """The program for a queue: the one that answers the most samples a second, of equals the larger.

    Args:
        waiting: samples in the queue, at least 1.
        times: seconds of a call, by batch size.
    """
    return max(times, key=lambda size: (min(size, waiting) / times[size], size))


def server(arrivals: Sequence[float], answer: Answer, times: Mapping[int, float], clock: Clock) -> list[float]:
    """Latencies of queries that arrive on a schedule, in seconds, in the order of their arrival.

    One batch runs at a time. When it has ended, the oldest samples that wait make up the next one; nothing waits for a batch to
    fill up.

    Args:
        arrivals: seconds from now, ascending.
        answer: answers a batch.
        times: seconds of a call, by batch size; for `batch_for`.
        clock: the clock.
    """
    begun, done, arrived = clock.now(), 0, 0
    found: list[float] = []
    while done < len(arrivals):
        clock.wait_until(begun + arrivals[done])
        now = clock.now() - begun
        while arrived < len(arrivals) and arrivals[arrived] <= now:
            arrived += 1
        waiting = max(1, arrived - done)
        size = batch_for(waiting, times)
        count = min(size, waiting)
        answer(count, size)
        ended = clock.now() - begun
        found.extend(ended - arrival for arrival in arrivals[done : done + count])
        done += count
    return found


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """A load that was tried.

    Attributes:
        rate: arrivals a second.
        latencies: of the queries.
        keeps: whether the 99th percentile kept the bound.
    """

    rate: float
    latencies: Latencies
    keeps: bool


def highest_load(
    attempt: Callable[[float], ServerLoad], guess: float, ceiling: float, trials: int = TRIALS
) -> list[ServerLoad]:
    """Try loads, to find the highest that keeps a bound: from a guess in steps to both sides, then by halving between.

    Args:
        attempt: tries a load.
        guess: the first one, arrivals a second.
        ceiling: a load that no net keeps, such as its offline throughput.
        trials: how many are tried.

    Returns:
        The loads in the order in which they were tried. The answer is the highest that keeps the bound below the lowest that
        does not.
    """
    low, high, found = 0.0, ceiling, list[ServerLoad]()
    missed = False
    rate = min(guess, 0.98 * ceiling)
    for _ in range(trials):
        load = attempt(rate)
        found.append(load)
        if load.keeps:
            low = rate
        else:
            high, missed = rate, True
        if not low:
            rate = high * STEP
        elif not missed:
            rate = min(low / STEP, (low + high) / 2)
        else:
            rate = (low + high) / 2
        if low > 0.98 * high:
            break
    return found


def best_of(loads: Sequence[ServerLoad]) -> ServerLoad | None:
    """The highest load that keeps the bound, below the lowest that does not; None if there is none."""
    missed = min((load.rate for load in loads if not load.keeps), default=math.inf)
    return max((load for load in loads if load.keeps and load.rate < missed), key=lambda load: load.rate, default=None)
