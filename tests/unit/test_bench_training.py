"""bench/training/training.py: when a provider's first losses are right."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from bench.training import training_case

EXACT = [19.23, 11.18, 17.56, 19.50, 12.34]
STOCK = [19.25, 11.33, 17.59, 19.39, 11.57]


Right = Callable[[list[float]], bool]


@pytest.fixture
def right() -> Right:
    return lambda losses: training_case.is_right(losses, [STOCK], EXACT, training_case.FAR["bf16"])


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


def test_a_captured_step_is_judged_from_the_step_that_it_begins_with():
    assert training_case.is_right(EXACT[3:], [STOCK], EXACT, 0.02, ahead=3)
    assert not training_case.is_right(EXACT[1:3], [STOCK], EXACT, 0.02, ahead=3)


def test_losses_may_be_as_far_off_as_any_rounded_run_was_until_then():
    losses = [*EXACT[:3], EXACT[3] * 1.08, EXACT[4]]
    early, late = [*EXACT[:2], EXACT[2] * 1.03, *EXACT[3:]], [*EXACT[:4], EXACT[4] * 1.03]
    assert not training_case.is_right(losses, [EXACT, EXACT], EXACT, 0.02)
    assert not training_case.is_right(losses, [EXACT, late], EXACT, 0.02)
    assert training_case.is_right(losses, [EXACT, early], EXACT, 0.02)
    assert training_case.is_right(losses, [early, EXACT], EXACT, 0.02)


def test_nudged_losses_are_off_by_about_a_rounding():
    """The net takes one rounding to bf16 at the beginning about as far as a rounding; another seed is another run."""
    case = training_case.Case("resnet20_cifar10", 4, "bf16", "cpu")
    exact = training_case.exact_losses(case)
    first, again, other = (training_case.exact_losses(case, seed) for seed in (1, 1, 2))
    assert first == again != other
    assert 0 < training_case.offsets(first, exact)[0] < 0.05
    assert training_case.exact_losses(case) == exact
    x = torch.linspace(1.0, 2.0, 1000)
    off = (training_case.nudged(x, 2**-9, 3) / x - 1).abs()
    assert 2**-10 < off.max() <= 2**-9 * 1.01
