"""The shortest run by a clock of the test's own: the same figure on a quiet and on a busy machine."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest

from convoy.measurement.device.shortest_run import (
    LEAST_S,
    MOST_S,
    NO_RATE,
    SAMPLE_S,
    Rate,
    ShortestRun,
    faster,
    shortest_run,
)

RUN_S = 3e-4


class Machine:
    """A clock that a run moves on: by `RUN_S`, times what disturbs it."""

    def __init__(self, disturbance: Callable[[], float], wait_s: float = 0.0, run_s: float = RUN_S) -> None:
        self.now, self.runs, self._disturbance, self._wait_s, self._run_s = 0.0, 0, disturbance, wait_s, run_s

    def run(self) -> None:
        self.runs += 1
        self.now += self._run_s * self._disturbance()

    def wait(self) -> None:
        self.now += self._wait_s

    def clock(self) -> float:
        return self.now

    def time(self, device: str = "cpu") -> ShortestRun:
        return shortest_run(self.run, device, self.clock, self.wait)


def busy(seed: int, undisturbed: float) -> Callable[[], float]:
    """Stretches of up to 20 runs, of which most are two to ten times slower; each run differs by up to a percent."""
    rng = random.Random(seed)

    def stretches() -> Iterator[float]:
        while True:
            slow = 1.0 if rng.random() < undisturbed else rng.uniform(2, 10)
            for _ in range(rng.randint(1, 20)):
                yield slow * rng.uniform(1.0, 1.01)

    return stretches().__next__


@pytest.mark.parametrize("seed", range(20))
def test_a_busy_machine_gives_the_figure_of_a_quiet_one(seed: int) -> None:
    found = Machine(busy(seed, 1 / 4)).time()
    assert found.settled
    assert RUN_S <= found.time_s <= 1.05 * RUN_S


def test_a_quiet_machine_needs_the_least_time() -> None:
    machine = Machine(lambda: 1.0)
    assert machine.time() == ShortestRun(pytest.approx(RUN_S), settled=True)
    assert LEAST_S < machine.now < LEAST_S + 3 * RUN_S


def test_the_first_runs_are_not_timed() -> None:
    slow = iter([100.0])
    machine = Machine(lambda: next(slow, 1.0))
    assert machine.time().time_s == pytest.approx(RUN_S)


def test_neighbouring_samples_that_are_equally_slow_settle_nothing() -> None:
    differing = [20.0 - 0.5 * i for i in range(25)]
    slow = iter([*differing, *[4.0] * 8])  # after `LEAST_S`, and 10 ms at once
    assert sum(differing) * RUN_S > LEAST_S
    machine = Machine(lambda: next(slow, 1.0))
    assert machine.time().time_s == pytest.approx(RUN_S)


def test_samples_that_never_agree_are_told_and_take_bounded_time() -> None:
    rng = random.Random(1)
    machine = Machine(lambda: 2.0 ** rng.uniform(0, 20))
    found = machine.time()
    assert not found.settled
    assert found.time_s >= RUN_S
    assert MOST_S < machine.now < MOST_S + 2**20 * RUN_S


def test_one_long_run_is_a_sample_and_no_more_are_waited_for() -> None:
    machine = Machine(lambda: 1.0, run_s=10.0)
    assert machine.time().time_s == pytest.approx(10.0)
    assert machine.runs == 2


def test_on_a_gpu_a_sample_has_so_many_runs_that_launching_does_not_count() -> None:
    machine = Machine(lambda: 1.0, wait_s=1e-5, run_s=2e-5)
    found = machine.time("cuda")
    assert found.time_s == pytest.approx(2e-5, rel=0.02)
    assert machine.runs > SAMPLE_S / 3e-5


def test_the_faster_rate_counts_with_its_own_doubt() -> None:
    quick, slow = Rate.of(9e9, ShortestRun(1.0, settled=False)), Rate.of(1e9, ShortestRun(1.0, settled=True))
    assert faster(quick, slow) == faster(slow, quick) == Rate(9e9, settled=False)
    assert faster(NO_RATE, slow) == slow
