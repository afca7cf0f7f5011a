"""Errors that cross processes: they arrive as they were raised."""

from __future__ import annotations

import pickle
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from convoy.errors import (
    CompileError,
    ConvoyError,
    InputError,
    InternalError,
    LaunchError,
    PlanError,
    SelectionError,
    UnsupportedError,
)

ERRORS = (
    InputError("batch", -1, "a positive integer", "Give one."),
    PlanError("plan.target", "a", "b"),
    UnsupportedError("cudnn", "conv 3x3", "no plan"),
    SelectionError("no choice fits"),
    InternalError("selection", "value_bytes of the selection problem has 'x', expected a size"),
    CompileError("triton", "ptxas failed", "line 3"),
    LaunchError("illegal address"),
)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_pickled_error_is_the_same(error: ConvoyError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert (str(again), vars(again), again.exit_code) == (str(error), vars(error), error.exit_code)


def _refuse() -> None:
    raise InputError("tuning_memory_bytes", "10 MiB", "as much as the net takes while it runs", "Allow more.")


def test_another_processs_error_does_not_break_its_pool() -> None:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        with pytest.raises(InputError, match="as much as the net takes"):
            pool.submit(_refuse).result()
        assert pool.submit(int, "3").result() == 3


BIG: tuple[object, ...] = (10**5000, [10**5000], ["x" * 10**6] * 10**5, "\x1b\udc80" * 10**6, [[[[[[]]]]]] * 10**5)


@pytest.mark.parametrize("value", BIG, ids=range(len(BIG)))
def test_a_value_of_any_size_is_shown_in_one_short_line(value: object) -> None:
    shown = str(InputError("batch", value, "a positive integer"))
    assert len(shown) < 200
    assert shown.isprintable()


def test_a_message_shows_control_characters_escaped() -> None:
    error = InputError("plan.\u202e\x1b[2J", "", "no such field", "See \x07 or\nelse.")
    assert str(error) == "plan.\\u202e\\x1b[2J: got '', expected no such field. See \\x07 or\nelse."
    assert error.argument == "plan.\u202e\x1b[2J"


def test_a_path_is_shown_as_it_was_given() -> None:
    assert str(InputError("plan", Path("net.json"), "nothing")) == "plan: got 'net.json', expected nothing."
    assert str(InputError("input", [Path("a"), Path("b")], "one")) == "input: got ['a', 'b'], expected one."
