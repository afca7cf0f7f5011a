"""The collector afterwards works as before, also after an error and where the user has switched it off or frozen objects."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import convoy
from convoy.collection_pause import collection_paused, old_objects_skipped
from convoy.pipeline import tune_in_time, whole_model


@pytest.fixture(autouse=True)
def _as_before() -> Generator[None]:
    before = gc.isenabled()
    yield
    gc.enable() if before else gc.disable()


def test_a_pause_ends_with_its_block_and_the_outer_one_with_its_own() -> None:
    gc.enable()
    with collection_paused():
        with collection_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_an_error_ends_it_too() -> None:
    gc.enable()
    with pytest.raises(ValueError, match="x"), collection_paused():
        raise ValueError("x")
    assert gc.isenabled()


def test_a_collector_that_the_user_switched_off_stays_off() -> None:
    gc.disable()
    with collection_paused():
        assert not gc.isenabled()
    assert not gc.isenabled()


class Cycle:
    """An object that holds itself."""

    def __init__(self) -> None:
        self.own = self


def test_old_objects_are_skipped_in_the_block_and_new_ones_are_not() -> None:
    old = weakref.ref(Cycle())
    gc.disable()
    with old_objects_skipped():
        new = weakref.ref(Cycle())
        gc.collect()
        assert (old() is not None, new() is None) == (True, True)
    gc.collect()
    assert old() is None
    assert gc.get_freeze_count() == 0


def test_skipping_ends_early_where_it_is_told_and_after_an_error() -> None:
    with old_objects_skipped() as end:
        assert gc.get_freeze_count()
        end()
        assert not gc.get_freeze_count()
    with pytest.raises(ValueError, match="x"), old_objects_skipped():
        raise ValueError("x")
    assert not gc.get_freeze_count()


def test_what_the_user_froze_stays_frozen() -> None:
    gc.freeze()
    frozen = gc.get_freeze_count()
    try:
        with old_objects_skipped() as end:
            end()
        assert gc.get_freeze_count() > frozen // 2  # objects of other threads may go meanwhile
    finally:
        gc.unfreeze()


@pytest.mark.parametrize(("effort", "skipped"), [("none", True), ("quick", False)])
def test_a_first_answer_skips_old_objects_and_measuring_does_not(
    effort: str, skipped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Capturing and starting from a stored plan skip them at every effort."""
    seen: list[bool] = []

    def looks(made: Any) -> Any:
        def call(*args: Any, **named: Any) -> Any:
            seen.append(bool(gc.get_freeze_count()))
            return made(*args, **named)

        return call

    def measuring(*_: object, **__: object) -> None:
        seen.append(bool(gc.get_freeze_count()))
        raise StopAsyncIteration

    monkeypatch.setattr(whole_model, "captured_net", looks(whole_model.captured_net))
    monkeypatch.setattr(whole_model, "start_stored", looks(whole_model.start_stored))
    monkeypatch.setattr(tune_in_time, "measure", measuring)
    settings = convoy.Settings(effort=effort, db=tmp_path / "perf.db")
    with pytest.raises(StopAsyncIteration):
        convoy.optimize(nn.Conv2d(3, 4, 3).eval(), (torch.rand(1, 3, 8, 8),), settings=settings)
    assert seen == [True, True, skipped]
    assert not gc.get_freeze_count()
