"""Tuning takes a share of a training's time, unless the user says how long; the estimate changes nothing of the user's."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

import convoy
from convoy.training.trainer import tuning_time
from convoy.training.trainer.tuning_time import LEAST_S, PASSES, SHARE, with_tuning_time
from tests.unit.training.training_nets import net

X = torch.randn(8, 3, 10, 10)


def limit(steps: int, settings: convoy.Settings | None = None) -> float:
    return with_tuning_time(settings or convoy.Settings(), net(0.3).train(), X, steps, None).time_s


def test_a_long_training_is_tuned_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning_time, "_forward_s", lambda *_: 0.5)
    assert limit(1000) == pytest.approx(SHARE * 1000 * PASSES * 0.5)
    assert limit(3) == LEAST_S


@pytest.mark.parametrize(
    "settings", [convoy.Settings(time_s=3.0), convoy.Settings(effort="none"), convoy.Settings(effort="full")]
)
def test_what_the_user_says_stays(monkeypatch: pytest.MonkeyPatch, settings: convoy.Settings) -> None:
    monkeypatch.setattr(tuning_time, "_forward_s", lambda *_: pytest.fail("nothing is to be estimated"))
    assert with_tuning_time(settings, net(), X, 1000, None) is settings


def test_the_estimate_changes_nothing() -> None:
    model = net(0.5).train()
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    found = with_tuning_time(convoy.Settings(), model, X, 10**9, None)
    assert LEAST_S < found.time_s < 10**9
    assert model.training
    assert model.drop.training
    assert torch.equal(torch.get_rng_state(), random)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_a_model_that_cannot_be_copied_has_no_limit() -> None:
    model = net()
    with Path(__file__).open("rb") as model.handle:  # a file cannot be copied
        settings = convoy.Settings()
        assert with_tuning_time(settings, model, X, 10, None) is settings
