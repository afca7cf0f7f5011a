"""bench/tuning/known_rows.py: which rows a benchmark replays."""

import dataclasses
import importlib

import pytest

from convoy.perfdb import Database
from convoy.perfdb.row import Measurement, Status
from convoy.problem import ConvProblem, EngineConfig, Knobs
from convoy.target import Target

H100 = Target("cuda", "H100", "sm_90", 132, 1, 1)
OTHER = dataclasses.replace(H100, name="A100")
HIGH = dataclasses.replace(H100, versions=(("fp32_matmul", "high"),))
HALF = ConvProblem(1, 8, 8, 8, 8, 3, 3, x_dtype="fp16", weight_dtype="fp16", y_dtype="fp16")
FULL = dataclasses.replace(HALF, x_dtype="fp32", weight_dtype="fp32", y_dtype="fp32")


@pytest.fixture
def bench(monkeypatch):
    return importlib.import_module("bench.tuning.known_rows")


def row(target, k=0, problem=HALF, protocol="v5:graph:cold:200us"):
    return Measurement(
        problem.key, EngineConfig("a", 1, Knobs.of(k=k)), target.digest, protocol, Status.OK, 9, 1.0, 0.0
    )


def stored(path, *rows):
    with Database.open(path) as database:
        database.put(rows, targets=[H100, OTHER, HIGH])
    return path


def test_rows_by_an_earlier_protocol_are_left_out(bench, tmp_path):
    rows = [row(H100), row(H100, 1, protocol="v4:graph:cold:200us")]
    assert bench.present(H100) == rows[0].protocol
    target, found = bench.measurements(stored(tmp_path / "perf.db", *rows))
    assert (target, found) == (H100, rows[:1])


def test_a_target_of_other_precision_lends_what_does_not_heed_it(bench, tmp_path):
    lent = [row(HIGH, 2), row(HIGH, 3, FULL)]
    path = stored(tmp_path / "perf.db", row(H100, 0), row(H100, 1), row(H100, 4), *lent)
    target, found = bench.measurements(path)
    assert target == H100
    assert sorted(one.config.knobs["k"] for one in found) == [0, 1, 2, 4]
    assert {one.target for one in found} == {H100.digest}
    target, found = bench.measurements(path, HIGH.digest)
    assert target == HIGH
    assert sorted(one.config.knobs["k"] for one in found) == [0, 1, 2, 3, 4]


def test_rows_of_two_devices_are_not_mixed(bench, tmp_path):
    path = stored(tmp_path / "perf.db", row(H100), row(OTHER))
    with pytest.raises(SystemExit, match=r"several devices: .*A100"):
        bench.measurements(path)


@pytest.mark.parametrize(("digest", "words"), [("", "of a described target"), ("0" * 16, "of the target 0000")])
def test_a_target_without_rows_is_refused(bench, tmp_path, digest, words):
    path = stored(tmp_path / "perf.db", row(H100, protocol="v4:graph:cold:200us"))
    with pytest.raises(SystemExit, match=f"no rows {words}.*there are: none"):
        bench.measurements(path, digest)


def test_what_ships_is_asked_without_a_database(bench, monkeypatch):
    rows = {H100.digest: [row(H100), row(H100, 1)], OTHER.digest: [row(OTHER)]}
    monkeypatch.setattr(bench, "shipped_descriptions", lambda: {H100.digest: H100, OTHER.digest: OTHER})
    monkeypatch.setattr(bench, "read_shipped", rows.__getitem__)
    assert bench.measurements(None) == (H100, rows[H100.digest])
    assert bench.measurements(None, OTHER.digest) == (OTHER, rows[OTHER.digest])
