"""Plans in the database: put, replaced, bounded in number, and kept when the file is repaired or migrated."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from convoy.perfdb import Database, plan_table, sql
from convoy.perfdb.repair import read_contents, replace_damaged
from tests.unit.perfdb.perfdb_rows import failure, row, rows

VERSION_1 = (Path(__file__).parent / "version_1.sql").read_text(encoding="utf-8")


@pytest.fixture
def database():
    with Database.memory() as found:
        yield found


def test_a_plan_is_found_by_its_key_and_a_new_one_takes_its_place(database: Database) -> None:
    assert database.plans.get("a") is None
    for key, text in (("a", "1"), ("b", "2"), ("a", "3")):
        database.plans.put(key, text)
    assert (database.plans.get("a"), database.plans.get("b")) == ("3", "2")
    assert database.plans.keys() == ["b", "a"]
    assert database.info().plans == 2
    assert database.plans.clear() == 2
    assert database.plans.keys() == []


def test_the_last_plans_are_kept(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_table, "MOST_PLANS", 3)
    for key in "abcad":
        database.plans.put(key, "{}")
    assert database.plans.keys() == ["c", "a", "d"]


def test_the_sum_changes_with_every_row_of_the_problems_and_with_no_other(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sql, "_MOST_PARAMETERS", 2)
    database.put(rows(6))
    problems = [one.problem for one in rows(5)]
    before, everything = database.plans.sum_of_rows(problems), database.plans.sum_of_rows(None)
    assert before.startswith("5 rows")
    database.put([row(5, median_us=99.0)])
    assert database.plans.sum_of_rows(problems) == before
    assert database.plans.sum_of_rows(None) != everything
    seen = {before}
    for changed in (row(2, median_us=99.0), row(2, protocol="full-1"), failure(3)):
        database.put([changed])
        seen.add(database.plans.sum_of_rows(problems))
    database.clear()
    seen.add(database.plans.sum_of_rows(problems))
    assert len(seen) == 5


def test_a_repaired_file_keeps_its_plans(tmp_path: Path) -> None:
    path = tmp_path / "perf.db"
    with Database.open(path) as database:
        database.put(rows(3))
        database.plans.put("a", "1")
    _, contents = replace_damaged(path)
    assert contents.plans == {"a": "1"}
    with Database.open(path) as database:
        assert database.plans.get("a") == "1"
        assert len(database.rows()) == 3


def test_a_file_of_version_2_gets_a_table_of_plans(tmp_path: Path) -> None:
    path = tmp_path / "old.db"
    with closing(sql.connect(path)) as old:
        old.executescript(VERSION_1)
        old.executescript(sql.MIGRATIONS[0])
        old.execute("PRAGMA user_version = 2")
    assert read_contents(path).plans == {}
    with Database.open(path) as database:
        assert database.warnings == []
        assert len(database.rows()) == 3
        database.plans.put("a", "1")
        assert database.info().schema_version == sql.SCHEMA_VERSION
    with Database.open(path) as database:
        assert database.plans.get("a") == "1"


def test_a_plan_changed_behind_the_database_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "perf.db"
    with Database.open(path) as database:
        database.put(rows(2))
        database.plans.put("a", "1")
        database.plans.put("b", "2")
    with closing(sql.connect(path)) as other:
        other.execute("UPDATE plans SET json = '3' WHERE key = 'a'")
    with Database.open(path) as database:
        assert database.plans.get("a") is None
        assert database.plans.get("b") == "2"
        assert "was damaged" in database.warnings[0]
        assert len(database.rows()) == 2
