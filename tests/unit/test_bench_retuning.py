"""bench/tuning/retuning.py tells equal choices from different ones."""

import importlib
import os
from pathlib import Path

import pytest

from convoy.perfdb.row import Measurement, Status
from convoy.problem import EngineConfig, Knobs, LinearProblem

PROBLEM = LinearProblem(2, 8, 4)


@pytest.fixture
def retuning(monkeypatch):
    return importlib.import_module("bench.tuning.retuning")


def row(k, us, spread=0.0, status=Status.OK):
    more = {} if status is Status.OK else {"reason": "planted"}
    config = EngineConfig("a", 1, Knobs.of(k=k))
    return Measurement(PROBLEM.key, config, "0" * 16, "v4", status, 9, us, spread, **more)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ([row(0, 10.0), row(1, 20.0)], [row(0, 11.0), row(1, 19.0)], (1.0, True)),
        ([row(0, 10.0), row(1, 10.2)], [row(0, 10.3), row(1, 10.1)], (1.0, True)),
        ([row(0, 10.0, 0.6), row(1, 11.0, 0.5)], [row(1, 10.0)], (10 / 11, True)),
        ([row(0, 10.0), row(1, 12.0)], [row(0, 11.0), row(1, 10.8)], (21 / 22.8, False)),
        ([row(0, 10.0), row(1, 10.5)], [row(0, 12.0), row(1, 10.0)], (20.5 / 22, False)),
        ([row(0, 10.0)], [row(0, 9.1), row(1, 9.0)], (9 / 9.1, True)),
        ([row(0, 10.0)], [row(1, 9.0)], (0.0, False)),
        ([row(0, 10.0), row(1, 0.0, status=Status.COMPILE_ERROR)], [row(1, 9.0)], (0.0, False)),
        ([row(0, 10.0)], [row(1, 0.0, status=Status.COMPILE_ERROR)], None),
    ],
    ids=[
        "same",
        "turned round",
        "within the spreads",
        "another",
        "a better one",
        "tried later",
        "never tried",
        "failed before",
        "nothing now",
    ],
)
def test_same_or_tied(retuning, first, second, expected):
    found = retuning.agreement(first, second)
    if expected is None:
        assert found is None
    else:
        assert (found.fraction, found.tied) == (pytest.approx(expected[0]), expected[1])
        assert f"tied={expected[1]}".lower() in found.note


def test_the_note_has_both_tunings_times_of_both_winners(retuning):
    found = retuning.agreement([row(0, 10.0), row(1, 12.0)], [row(0, 11.0), row(1, 10.8)])
    assert found.note == "tied=false a@1[k=0], then a@1[k=1]: 10 and 12 us, 11 and 10.8 us"
    assert retuning.agreement([row(0, 10.0)], [row(1, 9.0)]).note.endswith("neither tuning has both")


def test_a_net_is_tuned_twice_from_nothing_and_once_from_the_database(retuning, monkeypatch):
    """The third tuning has the first one's rows: its seconds are those of a start from the database."""
    seen = []

    def tune(net, batch, dtype, target, database):
        seen.append(len(database.rows()))
        database.put([row(len(seen), 10.0)])
        return retuning.Tuned({PROBLEM.key: database.rows()}, frozenset(), float(len(seen)))

    monkeypatch.setattr(retuning, "tune", tune)
    tuned, seconds = retuning.tune_thrice("net", 1, "fp16", None)
    assert seen == [0, 1, 0]
    assert seconds == [1.0, 3.0, 2.0]
    assert [len(found.rows[PROBLEM.key]) for found in tuned] == [1, 1]


def test_a_cold_start_finds_nothing_compiled(retuning, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    with retuning.empty_caches():
        inside = {name: os.environ[name] for name in retuning.CACHES}
        assert str(tmp_path) not in inside.values()
        assert not any(Path(folder).exists() for folder in inside.values())
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path)
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ


def test_the_table_shows_seconds_and_how_many_layers_agree(monkeypatch):
    about = {"dtype": "fp16", "batch": "1", "device": "H200", "commit": "abc", "versions": "cudnn=9"}
    rows = [
        {**about, "subject": "net", "metric": "tuning_s", "p50": "48.7", "note": "from nothing"},
        {**about, "subject": "net", "metric": "start_s", "p50": "2.91", "note": "from the database"},
        {**about, "subject": "conv:a", "metric": "fraction_of_best", "p50": "1", "note": "net tied=true same"},
        {**about, "subject": "conv:b", "metric": "fraction_of_best", "p50": "0.9", "note": "net tied=false a, then b"},
    ]
    page = importlib.import_module("bench.tuning.choice_tables").retuning_table(rows, "Tuning twice")
    assert "| net | fp16 | 1 | 48.7 |  | 2.9 | 1 of 2 layers (50%) |" in page
