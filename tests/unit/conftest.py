"""Fixtures that the rooms share: an empty database, and engines that the search finds in place of Convoy's."""

import sys

import pytest

from convoy.perfdb import Database


@pytest.fixture
def database(tmp_path):
    # Without the rows that Convoy ships: to read tens of thousands takes seconds, and what a test measures must decide.
    with Database.open(tmp_path / "perf.db", shipped=False) as database:
        yield database


@pytest.fixture
def fakes(monkeypatch):
    """Engines that the search finds in place of Convoy's, by name."""
    found = {}
    monkeypatch.setattr(sys.modules["convoy.tune.search"], "load_competitor", lambda engine, extra: found[engine])

    def make(*engines):
        found.update((engine.id, engine) for engine in engines)
        return list(found)

    return make
