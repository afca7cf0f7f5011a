"""What searches need: engines of the tests' own, and a database; `faulty_engines` importable, here and in worker processes."""

import sys
from pathlib import Path

import pytest

from convoy.perfdb import Database

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "measurement"))


@pytest.fixture
def database(tmp_path):
    with Database.open(tmp_path / "perf.db") as database:
        yield database


@pytest.fixture
def fakes(monkeypatch):
    """Engines of the search's own, by name."""
    found = {}
    monkeypatch.setattr(sys.modules["convoy.tune.search"], "load", lambda engine, extra: found[engine])

    def make(*engines):
        found.update((engine.id, engine) for engine in engines)
        return list(found)

    return make
