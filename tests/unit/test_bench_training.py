"""bench/training.py: when a provider's first losses are right."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

import pytest

EXACT = [19.23, 11.18, 17.56, 19.50, 12.34]
STOCK = [19.25, 11.33, 17.59, 19.39, 11.57]


Right = Callable[[list[float]], bool]


@pytest.fixture
def right(monkeypatch: pytest.MonkeyPatch) -> Right:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "bench"))
    training = importlib.import_module("training")
    return lambda losses: training.is_right(losses, STOCK, EXACT, training.FAR["bf16"])


def test_losses_may_be_as_far_off_as_rounding_takes_them(right: Right):
    assert right(EXACT)
    assert right(STOCK)
    assert right([19.2, 11.4, 17.4, 19.6, 12.34 * 1.15])


@pytest.mark.parametrize("step", range(4))
def test_an_early_loss_that_is_off_is_not_excused_by_what_comes_later(right: Right, step: int):
    losses = list(EXACT)
    losses[step] *= 1.08
    assert not right(losses)


def test_a_loss_that_is_off_at_the_end_is_seen(right: Right):
    assert not right([*EXACT[:4], EXACT[4] * 1.3])
    assert not right([*EXACT[:4], float("nan")])


def test_a_captured_step_is_judged_from_the_step_that_it_begins_with(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "bench"))
    training = importlib.import_module("training")
    assert training.is_right(EXACT[3:], STOCK, EXACT, 0.02, ahead=3)
    assert not training.is_right(EXACT[1:3], STOCK, EXACT, 0.02, ahead=3)
