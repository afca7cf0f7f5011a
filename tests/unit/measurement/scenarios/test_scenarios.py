"""The scenarios on a virtual clock: every latency is known to the bit, and no time passes."""

from __future__ import annotations

import itertools
import math

import pytest

from convoy.measurement.scenarios.clock import VirtualClock, WallClock
from convoy.measurement.scenarios.load_test import guessed_load, run_load_test, simulated
from convoy.measurement.scenarios.scenarios import (
    ServerLoad,
    batch_for,
    best_of,
    highest_load,
    offline,
    poisson_arrivals,
    server,
    single_stream,
    summarised,
)

TIMES = {1: 0.25, 4: 0.5}
"""Seconds of a batch: numbers without rounding."""


class Net:
    """Answers batches in the times above, on a virtual clock."""

    def __init__(self) -> None:
        self.clock, self.calls = VirtualClock(), list[tuple[int, int]]()

    def __call__(self, samples: int, size: int) -> None:
        assert 1 <= samples <= size
        self.calls.append((samples, size))
        self.clock.advance(TIMES[size])


def test_percentiles_are_nearest_ranks() -> None:
    found = summarised([one / 1000 for one in range(100, 0, -1)])
    assert (found.queries, found.p50_ms, found.p90_ms, found.p99_ms) == (100, 50.0, 90.0, 99.0)
    assert summarised([0.25]).p99_ms == 250.0


def test_arrivals_are_a_poisson_process_of_the_rate_and_the_seed() -> None:
    arrivals = poisson_arrivals(200.0, 50.0, 7)
    assert arrivals == sorted(arrivals) == poisson_arrivals(200.0, 50.0, 7) != poisson_arrivals(200.0, 50.0, 8)
    assert arrivals[0] > 0
    assert arrivals[-1] < 50.0
    assert abs(len(arrivals) - 10_000) < 5 * math.sqrt(10_000)  # five standard deviations
    gaps = [later - sooner for sooner, later in itertools.pairwise(arrivals)]
    assert abs(sum(gap > 1 / 200 for gap in gaps) / len(gaps) - math.exp(-1)) < 0.02
    double = poisson_arrivals(400.0, 25.0, 7)
    assert double == pytest.approx([one / 2 for one in arrivals])


def test_single_stream_and_offline() -> None:
    net = Net()
    assert single_stream(net, 1, net.clock, 1.0) == [0.25] * 4
    assert offline(net, 4, net.clock, 1.1) == 0.5
    assert net.calls == [(1, 1)] * 4 + [(4, 4)] * 3
    assert single_stream(net, 4, net.clock, 0.0) == [0.5]


@pytest.mark.parametrize(("waiting", "size"), [(1, 1), (2, 4), (3, 4), (9, 4)])
def test_a_queue_gets_the_program_that_answers_most_samples_a_second(waiting: int, size: int) -> None:
    assert batch_for(waiting, TIMES) == size


def test_a_server_answers_those_that_wait_together_and_counts_their_time_in_the_queue() -> None:
    net = Net()
    arrivals = [1.0, 1.0625, 1.125, 2.0, 2.0, 2.0, 2.0, 2.0]
    latencies = server(arrivals, net, TIMES, net.clock)
    # 1.0 alone until 1.25; the two that came meanwhile until 1.75; four of 2.0 until 2.5; the last one until 2.75
    assert net.calls == [(1, 1), (2, 4), (4, 4), (1, 1)]
    assert latencies == [0.25, 0.6875, 0.625, 0.5, 0.5, 0.5, 0.5, 0.75]


def test_a_server_never_drops_a_query() -> None:
    net = Net()
    arrivals = poisson_arrivals(20.0, 10.0, 1)  # more than twice what it answers
    assert len(server(arrivals, net, TIMES, net.clock)) == len(arrivals) == sum(samples for samples, _ in net.calls)


def test_the_search_finds_the_highest_load_that_keeps_a_bound() -> None:
    def attempt(rate: float) -> ServerLoad:
        return ServerLoad(rate, summarised([rate]), rate <= 62.5)

    for guess in (10.0, 60.0, 99.0):
        loads = highest_load(attempt, guess, 100.0, trials=20)
        best = best_of(loads)
        assert best is not None
        assert 60.0 < best.rate <= 62.5
    assert best_of(highest_load(lambda rate: ServerLoad(rate, summarised([1.0]), False), 50.0, 100.0)) is None
    whole = best_of(highest_load(lambda rate: ServerLoad(rate, summarised([1.0]), True), 50.0, 100.0, trials=20))
    assert whole is not None
    assert 95.0 < whole.rate < 100.0


def test_a_load_that_keeps_the_bound_by_luck_above_one_that_misses_it_does_not_count() -> None:
    figures = summarised([1.0])
    assert best_of(
        [ServerLoad(3.0, figures, True), ServerLoad(2.0, figures, False), ServerLoad(1.0, figures, True)]
    ) == ServerLoad(1.0, figures, True)


def test_a_higher_load_waits_longer_in_the_simulation() -> None:
    low, high = (simulated(rate, 2000, 0, TIMES).p99_ms for rate in (1.0, 7.5))
    assert 500.0 <= low < high
    allowed = guessed_load(2000.0, 8.0, 0, TIMES)
    assert simulated(allowed, 3000, 0, TIMES).p99_ms <= 2000.0 < simulated(1.1 * allowed, 3000, 0, TIMES).p99_ms


def test_all_scenarios_of_one_net() -> None:
    net, said = Net(), list[str]()
    found = run_load_test(net, (4, 1), net.clock, seconds=400.0, seed=3, say=lambda phrase, *_: said.append(phrase))
    assert [(one.batch, one.batch_ms, one.samples_per_s) for one in found.batches] == [(1, 250.0, 4.0), (4, 500.0, 8.0)]
    assert (found.offline_batch, found.offline_samples_per_s) == (4, 8.0)
    assert found.single_stream.p90_ms == 250.0
    assert found.bound_ms == 1500.0
    assert found.server.rate == pytest.approx(5.6)
    assert found.batch_multiple == found.server.latencies.p99_ms / 500.0
    assert found.allowed is not None
    assert found.allowed.keeps
    assert found.allowed.latencies.p99_ms <= 1500.0
    assert found.allowed.rate < min(load.rate for load in found.tried if not load.keeps)
    assert found.fewest_queries >= 100
    assert said[:3] == ["single stream", "offline", "server"]


def test_a_bound_below_the_time_of_one_call_allows_no_load() -> None:
    net = Net()
    found = run_load_test(net, (1, 4), net.clock, seconds=50.0, bound_ms=100.0)
    assert found.allowed is None
    assert found.tried == ()
    assert found.fewest_queries == found.server.latencies.queries


def test_a_net_with_hiccups_keeps_no_bound_that_was_tried() -> None:
    clock, calls = VirtualClock(), itertools.count()
    found = run_load_test(
        lambda *_: clock.advance(10.0 if next(calls) % 10 == 9 else 0.25), (1,), clock, seconds=50_000.0, bound_ms=400.0
    )
    assert found.single_stream.p50_ms == 250.0
    assert found.allowed is None
    assert found.tried
    assert not any(load.keeps for load in found.tried)


def test_the_machines_clock_waits_until_a_time() -> None:
    clock = WallClock()
    when = clock.now() + 0.004
    clock.wait_until(when)
    assert clock.now() >= when
    clock.wait_until(when)
