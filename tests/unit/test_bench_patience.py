"""bench/shared/time_limit.py: a peer that takes too long is stopped, whatever it catches."""

import importlib
import signal
import time

import pytest


@pytest.fixture
def patience(monkeypatch):
    return importlib.import_module("bench.shared.time_limit")


@pytest.fixture
def within(patience):
    return patience.within


def test_a_benchmark_may_show_what_it_has_when_time_is_up(patience):
    with patience.until(0.05), pytest.raises(patience.TimeIsUpError):
        time.sleep(60)
    with patience.until(0):
        time.sleep(0.01)


def test_what_takes_too_long_is_stopped_even_where_it_goes_on_after_exceptions(within):
    failed = []

    def tune():
        for choice in range(1000):
            try:
                time.sleep(0.01)
            except Exception:
                failed.append(choice)

    with pytest.raises(TimeoutError, match=r"took longer than 0\.05 s"), within(0.05):
        tune()
    assert failed == []


def test_what_is_done_in_time_is_left_alone(within):
    before = signal.getsignal(signal.SIGALRM)
    with within(60):
        pass
    with pytest.raises(KeyError), within(60):
        raise KeyError("its own")
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
    assert signal.getsignal(signal.SIGALRM) is before
