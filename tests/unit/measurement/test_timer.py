import gc

import pytest

from convoy.measurement import timer
from convoy.measurement.protocol import Protocol


class Clock:
    """A clock that only launches advance."""

    def __init__(self):
        self.now_ns = 0
        self.log = []

    def launch(self, name, us):
        def run():
            self.log.append(name)
            self.now_ns += round(us * 1000)

        return run


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(timer.time, "perf_counter_ns", lambda: clock.now_ns)
    return clock


def rounds_of(log):
    """The log with repeats of one name in a row written once."""
    return [name for index, name in enumerate(log) if index == 0 or log[index - 1] != name]


def test_samples_are_microseconds_of_one_launch(clock):
    found = timer.time_rounds([clock.launch("a", 100), clock.launch("b", 7.5)], Protocol("wall"), 5, "cpu")
    assert found == [pytest.approx([100.0] * 5), pytest.approx([7.5] * 5)]


def test_candidates_take_turns(clock):
    timer.time_rounds([clock.launch(n, 400) for n in "abc"], Protocol("wall", min_sample_us=500), 4, "cpu")
    assert rounds_of(clock.log)[3:] == list("abc") * 4


def test_short_launches_are_repeated_until_a_sample_is_long_enough(clock):
    timer.time_rounds([clock.launch("a", 10)], Protocol("wall", min_sample_us=1000), 3, "cpu")
    # Two to find out how long one takes; in each round one that leads and a hundred that are timed.
    assert len(clock.log) == 2 + 3 * (1 + 100)


def test_long_launches_are_timed_one_by_one(clock):
    timer.time_rounds([clock.launch("a", 5000)], Protocol("wall", min_sample_us=1000), 3, "cpu")
    assert len(clock.log) == 2 + 3


def test_a_launch_too_short_for_the_clock_is_not_repeated_for_ever(clock):
    timer.time_rounds([clock.launch("a", 0)], Protocol("wall", min_sample_us=10**9), 1, "cpu")
    assert len(clock.log) == 2 + 1 + timer.MAX_REPEATS


def test_whoever_is_about_to_run_is_announced(clock):
    launches = [clock.launch("a", 600), clock.launch("b", 600)]
    timer.time_rounds(launches, Protocol("wall"), 2, "cpu", clock.log.append)
    order = rounds_of(clock.log)
    assert order == [0, "a", 1, "b", 0, "a", 1, "b", 0, "a", 1, "b"]


def test_the_first_run_is_the_second_launch(clock):
    times = iter([9000, 40])

    def run():
        clock.now_ns += next(times) * 1000

    assert timer.first_run_us(run, "cpu") == pytest.approx(40)


@pytest.mark.parametrize("on", [True, False])
def test_garbage_collection_waits_and_comes_back(clock, on):
    was_on = gc.isenabled()
    seen = []
    try:
        (gc.enable if on else gc.disable)()
        timer.time_rounds([lambda: seen.append(gc.isenabled())], Protocol("wall", min_sample_us=1), 2, "cpu")
        assert gc.isenabled() is on
    finally:
        (gc.enable if was_on else gc.disable)()
    assert not any(seen)


def test_garbage_collection_comes_back_after_a_failure(clock):
    def bad():
        raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011
        timer.time_rounds([bad], Protocol("wall"), 2, "cpu")
    assert gc.isenabled()


@pytest.mark.parametrize(("once_us", "launches"), [(0.0, 64), (5.0, 64), (9.0, 44), (40.0, 10), (400.0, 1), (1e6, 1)])
def test_a_graph_is_long_beside_its_own_start(once_us, launches):
    assert timer.launches_in_graph(once_us, 200) == launches
    assert launches == 64 or launches * once_us > 75 * timer.GRAPH_START_US


def test_the_hosts_time_does_not_choose_a_graphs_launches(monkeypatch):
    found = []
    monkeypatch.setattr(timer, "replayed_us", lambda launch: 20.0)
    monkeypatch.setattr(timer, "first_run_us", lambda launch, device: pytest.fail("the host's clock was asked"))
    monkeypatch.setattr(timer, "_graph_sampler", lambda launch, launches, protocol: found.append(launches))
    timer._sampler(lambda: None, Protocol("graph", min_sample_us=200), "cuda")
    assert found == [20]
