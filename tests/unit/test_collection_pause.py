"""The pause of the collector ends as it began, also after an error and where the user has switched the collector off."""

from __future__ import annotations

import gc
from collections.abc import Generator

import pytest

from convoy.collection_pause import collection_paused


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
