"""Deadlines: the time of a call, parts of it, and an early end."""

from __future__ import annotations

import math
import warnings
from pathlib import Path

import pytest

from convoy.deadline import Deadline
from convoy.errors import InputError
from convoy.settings import Settings


def test_time_runs_down_and_never_below_nothing() -> None:
    now = [5.0]
    call = Deadline(10, lambda: now[0])
    assert (call.spent_s, call.left_s, call.is_over, call.is_limited) == (0.0, 10.0, False, True)
    now[0] = 18.0
    assert (call.spent_s, call.left_s, call.is_over) == (13.0, 0.0, True)


def test_without_a_limit_only_a_stop_ends_it() -> None:
    call = Deadline()
    assert (call.left_s, call.is_over, call.is_limited) == (math.inf, False, False)
    call.stop()
    assert (call.left_s, call.is_over, call.was_stopped) == (0.0, True, True)


def test_an_earlier_deadline_keeps_a_reserve_and_is_stopped_with_the_whole() -> None:
    now = [0.0]
    call = Deadline(10, lambda: now[0])
    search = call.earlier(3)
    assert (search.left_s, search.seconds) == (7.0, 7)
    now[0] = 8.0
    assert (search.is_over, call.is_over) == (True, False)
    assert Deadline(1, lambda: now[0]).earlier(2).is_over
    unlimited = Deadline()
    part = unlimited.earlier(3)
    assert not part.is_over
    unlimited.stop()
    assert part.is_over
    assert part.was_stopped


def test_the_former_name_of_the_time_is_taken_with_a_warning_at_the_users_line() -> None:
    with pytest.warns(UserWarning, match=r"convoy: Settings.tune_s is now time_s") as caught:
        settings = Settings(tune_s=3)  # type: ignore[call-arg]
    assert Path(caught[0].filename) == Path(__file__)
    assert settings == Settings(time_s=3.0)
    with pytest.warns(UserWarning, match="time_s"):
        assert settings.tune_s == 3.0  # type: ignore[attr-defined]
    with pytest.raises(InputError, match="tune_s: got 3, expected time_s alone"):
        Settings(tune_s=3, time_s=4)  # type: ignore[call-arg]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Settings(time_s=3)
