"""The schema: columns, versions, migrations, and the one module that may write SQL."""

from __future__ import annotations

import ast
import re
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

import convoy
from convoy.perfdb import Database, sql, stored
from convoy.perfdb.faults import DamagedFileError
from convoy.perfdb.record import COLUMNS, DEFAULTS, KEY_COLUMNS, target_json, to_record
from tests.unit.perfdb.perfdb_rows import POOL, PROTOCOL, TARGET, failure, raw, row, rows

VERSION_1 = (Path(__file__).parent / "version_1.sql").read_text(encoding="utf-8")


@pytest.fixture
def connection():
    with closing(sql.connect(":memory:")) as found:
        sql.create(found)
        yield found


def test_the_tables_columns_are_the_records_columns_and_the_seal(connection: sqlite3.Connection) -> None:
    columns = connection.execute("PRAGMA table_info(measurements)").fetchall()
    assert [c[1] for c in columns] == list(stored.STORED_COLUMNS)
    assert set(stored.STORED_COLUMNS) == {*COLUMNS, "seal"}
    kinds = {str: "TEXT", int: "INTEGER", float: "REAL", bool: "INTEGER"}
    assert {c[1]: c[2] for c in columns} == {**{name: kinds[kind] for name, kind in COLUMNS.items()}, "seal": "INTEGER"}
    assert [c[1] for c in sorted(columns, key=lambda c: c[5]) if c[5]] == list(KEY_COLUMNS)


def test_there_is_a_migration_from_every_version() -> None:
    assert len(sql.MIGRATIONS) == sql.SCHEMA_VERSION - 1


def test_last_years_database_still_opens(tmp_path: Path) -> None:
    path = tmp_path / "old.db"
    with raw(path) as old:
        old.executescript(VERSION_1)
    with Database.open(path) as database:
        assert database.warnings == []
        assert database.rows() == [row(0), failure(1), row(2, problem=POOL.key)]
        assert database.text(POOL.key) == POOL.text
        database.put([row(3)], targets=[TARGET])
        assert database.info().schema_version == sql.SCHEMA_VERSION
    with Database.open(path) as database:
        assert len(database.rows()) == 4
        assert database.target(TARGET.digest) == TARGET


def test_a_migrated_database_has_the_layout_of_a_new_one(connection: sqlite3.Connection) -> None:
    with closing(sql.connect(":memory:")) as old:
        old.executescript(VERSION_1)
        sql.migrate(old, 1)
        assert sql.layout(old) == sql.layout(connection)
        assert sql.schema_version(old) == sql.SCHEMA_VERSION
        assert sql.application_id(old) == sql.application_id(connection) == sql.APPLICATION_ID


def test_a_failing_migration_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sql, "MIGRATIONS", ("CREATE TABLE extra (a);\nINSERT INTO nowhere VALUES (1);\n",))
    with closing(sql.connect(":memory:")) as old:
        old.executescript(VERSION_1)
        before = list(old.iterdump())
        with pytest.raises(sqlite3.OperationalError, match="nowhere"):
            sql.migrate(old, 1)
        assert list(old.iterdump()) == before
        assert sql.schema_version(old) == 1


def test_a_column_appended_by_a_migration_leaves_old_rows_valid(
    monkeypatch: pytest.MonkeyPatch, connection: sqlite3.Connection
) -> None:
    """The likeliest migration: rows from before have one value less on disk, and the default in SQL."""
    records = [to_record(r) for r in rows(3)]
    sql.put_records(connection, records)
    script = "ALTER TABLE measurements ADD COLUMN energy_uj REAL NOT NULL DEFAULT 0;\n"
    monkeypatch.setattr(sql, "MIGRATIONS", (*sql.MIGRATIONS, script))
    monkeypatch.setattr(sql, "SCHEMA_VERSION", sql.SCHEMA_VERSION + 1)
    monkeypatch.setitem(COLUMNS, "energy_uj", float)  # type: ignore[arg-type]
    monkeypatch.setitem(DEFAULTS, "energy_uj", 0.0)
    monkeypatch.setattr(stored, "STORED_COLUMNS", (*stored.STORED_COLUMNS, "energy_uj"))
    sql.migrate(connection, sql.SCHEMA_VERSION - 1)
    found = connection.execute("SELECT * FROM measurements ORDER BY rowid").fetchall()
    for values, record in zip(found, records, strict=True):
        assert stored.verified_record(values) == {**record, "energy_uj": 0.0}
        assert stored.verified_record(values[:-1]) == {**record, "energy_uj": 0.0}
        with pytest.raises(DamagedFileError):
            stored.verified_record((*values[:-1], 7.0))


def test_what_a_newer_convoy_wrote_into_the_same_tables_is_kept_but_not_used(connection: sqlite3.Connection) -> None:
    unknown = {**to_record(row(0)), "problem": "attention:n1"}
    sql.put_records(connection, [to_record(row(0)), unknown])
    assert sql.select(connection, {}) == [row(0)]
    assert list(sql.select_records(connection)) == [to_record(row(0)), unknown]


def test_a_later_fact_replaces_and_an_earlier_one_does_not(connection: sqlite3.Connection) -> None:
    old, new = (to_record(row(0, median_us=t, date=f"202{t:.0f}-01-01")) for t in (5.0, 6.0))
    assert sql.put_records(connection, [new]) == 1
    assert sql.put_records(connection, [old, new], newer_only=True) == 0
    assert [r.median_us for r in sql.select(connection, {})] == [6.0]
    assert sql.put_records(connection, [old]) == 1
    assert [r.median_us for r in sql.select(connection, {})] == [5.0]
    assert sql.put_records(connection, [new], newer_only=True) == 1


def test_a_stored_value_changed_behind_our_back_is_damage(connection: sqlite3.Connection) -> None:
    sql.put_records(connection, [to_record(row(0))])
    sql.put_pairs(connection, "texts", {POOL.key: POOL.text})
    sql.put_pairs(connection, "targets", {TARGET.digest: target_json(TARGET)})
    connection.execute("UPDATE measurements SET median_us = median_us / 2")
    connection.execute("UPDATE texts SET text = 'another'")
    connection.execute("UPDATE targets SET json = '{}'")
    with pytest.raises(DamagedFileError):
        sql.select(connection, {})
    with pytest.raises(DamagedFileError):
        sql.lookup(connection, row(0).problem, TARGET.digest, PROTOCOL)
    for table in ("texts", "targets"):
        with pytest.raises(DamagedFileError):
            sql.select_pairs(connection, table)


def test_a_transaction_is_undone_by_an_interrupt(connection: sqlite3.Connection) -> None:
    with pytest.raises(KeyboardInterrupt), sql.transaction(connection):  # noqa: PT012
        sql.put_records(connection, [to_record(row(0))])
        raise KeyboardInterrupt
    assert sql.count(connection, {}) == 0
    with sql.transaction(connection):
        sql.put_records(connection, [to_record(row(0))])
    assert sql.count(connection, {}) == 1


def test_no_other_module_writes_sql() -> None:
    """Three modules of perfdb do: the schema, the statements of a sound database, and those that read a damaged one."""
    statement = re.compile(r"\b(SELECT .* FROM|INSERT INTO|DELETE FROM|UPDATE \w+ SET|CREATE TABLE|PRAGMA \w+)\b")
    package = Path(convoy.__file__).parent
    assert statement.search(_strings(package / "perfdb" / "sql.py"))
    guilty = [
        p
        for p in package.rglob("*.py")
        if p.name not in ("schema.py", "sql.py", "damaged_tables.py") and statement.search(_strings(p))
    ]
    assert guilty == []


def _strings(path: Path) -> str:
    """Texts in a module's code, those that only document left out."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    documents = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    texts = [n for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    return "\n".join(str(n.value) for n in texts if id(n) not in documents)
