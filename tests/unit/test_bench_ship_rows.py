"""bench/tuning/ship_rows.py: rows of a database join those that ship."""

import dataclasses

import pytest
from bench.tuning import ship_rows

from convoy.perfdb import Database
from convoy.perfdb.row import Measurement, Status
from convoy.perfdb.shipped import read_shipped, write_shipped
from convoy.problem import ConvProblem, EngineConfig, Knobs
from convoy.target import Target

TARGET = Target("cuda", "H100", "sm_90", 132, 1, 1)
PROBLEM = ConvProblem(1, 8, 8, 8, 8, 3, 3)


def row(k: int, median_us: float) -> Measurement:
    config = EngineConfig("a", 1, Knobs.of(k=k))
    return Measurement(PROBLEM.key, config, TARGET.digest, "v5:graph:cold:200us", Status.OK, 9, median_us, 0.0)


@pytest.fixture
def shipped(monkeypatch, tmp_path):
    folder = tmp_path / "shipped"
    write_shipped([row(0, 1.0), row(1, 2.0)], folder, {TARGET.digest: TARGET})
    monkeypatch.setattr(ship_rows, "shipped_folder", lambda: folder)
    for name in ("shipped_targets", "shipped_descriptions"):
        real = getattr(ship_rows, name)
        monkeypatch.setattr(ship_rows, name, lambda real=real: real(folder))
    monkeypatch.setattr(ship_rows, "read_shipped", lambda digest: read_shipped(digest, folder))
    return folder


def times(folder, target=TARGET) -> dict[int, float]:
    return {int(found.config.knobs["k"]): found.median_us for found in read_shipped(target.digest, folder)}


def test_a_new_row_takes_the_place_of_an_old_one(shipped, tmp_path, monkeypatch, capsys):
    other = dataclasses.replace(TARGET, name="A100")
    with Database.open(tmp_path / "new.db", shipped=False) as database:
        new = [row(1, 1.5), row(2, 3.0)]
        database.put(new, targets=[TARGET])
        database.put([dataclasses.replace(new[0], target=other.digest)], targets=[other])
    monkeypatch.setattr("sys.argv", ["ship_rows.py", str(tmp_path / "new.db")])
    ship_rows.main()
    assert times(shipped) == {0: 1.0, 1: 1.5, 2: 3.0}
    assert times(shipped, other) == {}  # nothing ships for it
    said = capsys.readouterr().out
    assert "1 rows more, 3 in all" in said
    assert f"{other.digest}: left out" in said
    monkeypatch.setattr("sys.argv", ["ship_rows.py", str(tmp_path / "new.db"), "--all"])
    ship_rows.main()
    assert times(shipped, other) == {1: 1.5}
