"""Exports and imports: round trips, refusals with their lines, nothing half-imported."""

from __future__ import annotations

import csv
import dataclasses
import gzip
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from convoy.errors import InputError
from convoy.perfdb import Database
from convoy.perfdb.csv_rows import SUFFIXES, file_form
from convoy.perfdb.record import COLUMNS
from convoy.perfdb.sql import SCHEMA_VERSION
from convoy.perfdb.transfer import ImportBatch, read_file, write_all
from tests.unit.perfdb.perfdb_rows import OTHER, POOL, TARGET, failure, row, rows

ALL = [
    *rows(6),
    failure(6),
    failure(7, reason="a\r\nb,\"c\"\t'd'\u2028ü\x00"),
    row(8, problem=POOL.key, median_us=0.1 + 0.2),
]


@pytest.fixture
def database():
    with Database.memory() as found:
        yield found


def full(path: Path) -> Path:
    with Database.memory() as source:
        source.put(ALL, {POOL.key: POOL.text}, targets=[TARGET])
        source.export(path)
    return path


@pytest.mark.parametrize("suffix", [*SUFFIXES, ".CSV"])
def test_an_export_comes_back_the_same(tmp_path: Path, database: Database, suffix: str) -> None:
    path = full(tmp_path / f"all{suffix}")
    done = database.import_(path)
    everything = "jsonl" in suffix
    assert dataclasses.astuple(done) == (len(ALL), 0, int(everything), int(everything), ())
    with Database.memory() as source:
        source.put(ALL)
        assert database.rows() == source.rows()
    assert database.text(POOL.key) == (POOL.text if everything else None)
    assert database.target(TARGET.digest) == (TARGET if everything else None)
    assert [f.name for f in tmp_path.iterdir()] == [path.name]


def test_csv_is_long_form_with_a_column_a_field(tmp_path: Path) -> None:
    with full(tmp_path / "all.csv").open(newline="", encoding="utf-8") as file:
        found = list(csv.DictReader(file))
    assert list(found[0]) == list(COLUMNS)
    assert len(found) == len(ALL)
    assert {line["deterministic"] for line in found} == {"true", "false"}


def test_json_lines_name_their_table(tmp_path: Path) -> None:
    lines = [json.loads(line) for line in full(tmp_path / "all.jsonl").read_text().split("\n")[:-1]]
    assert lines[0] == {"table": "database", "schema_version": SCHEMA_VERSION}
    assert [line["table"] for line in lines[1:]] == ["targets", "texts", *["measurements"] * len(ALL)]
    assert set(lines[-1]) == {"table", *COLUMNS}


def test_an_export_holds_what_its_rows_need(tmp_path: Path, database: Database) -> None:
    database.put([row(0), row(1, target=OTHER.digest)], {POOL.key: POOL.text}, targets=[TARGET, OTHER])
    assert database.export(tmp_path / "a.jsonl", target=OTHER.digest) == 1
    incoming = read_file(tmp_path / "a.jsonl")
    assert (len(incoming.rows), set(incoming.targets), incoming.texts) == (1, {OTHER.digest}, {})


def test_the_newest_fact_wins(tmp_path: Path, database: Database) -> None:
    path = full(tmp_path / "all.jsonl")
    newer, older = row(0, median_us=1.0, date="2027-01-01"), row(1, median_us=2.0, date="2020-01-01")
    database.put([newer, older])
    done = database.import_(path)
    assert (done.measurements, done.unchanged) == (len(ALL) - 1, 1)
    assert newer in database.rows()
    assert row(1) in database.rows()
    assert database.import_(path).measurements == 0


def spoilt_lines(path: Path) -> dict[int, str]:
    """Replace some lines of an export by malformed ones; line → a word of its refusal."""
    lines = path.read_bytes().split(b"\n")
    if path.suffix == ".csv":
        changes = {
            3: (lines[2].replace(b"12.25", b"nan").replace(b"11.25", b"nan"), "median_us"),
            4: (lines[3] + b",extra", "values"),
            5: (lines[4].replace(b"quick-1", b"quick 1"), "protocol"),
            6: (lines[5].replace(b",ok,", b",fine,"), "status"),
        }
    else:
        changes = {
            4: (lines[3].replace(b'"version": 1', b'"version": "1"'), "version"),
            5: (b"{not json", "JSON"),
            6: (b"[1, 2]", "object"),
            7: (b"[" * 100_000, "JSON"),
            8: (b'{"table": "measurements", "problem": "conv"}', "engine"),
            9: (b'{"table": "sqlite_master"}', "table"),
            10: (b'{"table": "texts", "key": "subgraph:nchw:000000000000000000000000", "text": "t"}', "text"),
            11: (b'{"table": "targets", "digest": "0000000000000000", "json": {"device": 1}}', "target"),
        }
    for number, (line, _) in changes.items():
        assert line != lines[number - 1]
        lines[number - 1] = line
    path.write_bytes(b"\n".join(lines))
    return {number: word for number, (_, word) in changes.items()}


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_refusals_have_their_lines_and_nothing_is_half_imported(
    tmp_path: Path, database: Database, suffix: str
) -> None:
    path = full(tmp_path / f"all{suffix}")
    spoilt = spoilt_lines(path)
    done = database.import_(path)
    assert {refusal.line for refusal in done.refused} == set(spoilt)
    assert all(spoilt[refusal.line] in refusal.reason for refusal in done.refused), done.refused
    assert (done.measurements, done.texts, database.rows()) == (0, 0, [])
    assert database.text(POOL.key) is None
    partial = database.import_(path, partial=True)
    assert partial.refused == done.refused
    assert partial.measurements == len(database.rows()) > 0
    assert all(found in ALL for found in database.rows())


def test_a_line_number_counts_lines_within_quotes(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    write_all([failure(0, reason="one\ntwo\nthree"), row(1)], {}, {}, path)
    path.write_text(path.read_text().replace("11.25", "-11.25"))
    (refusal,) = read_file(path).refused
    assert refusal.line == 5


def test_missing_columns_take_their_defaults_and_order_does_not_matter(tmp_path: Path, database: Database) -> None:
    names = ["status", "median_us", *(name for name in ("problem", "engine", "version", "knobs", "target", "protocol"))]
    values = ["ok", "10", row(0).problem, "aten", "1", "", TARGET.digest, "quick-1"]
    (tmp_path / "a.csv").write_text(",".join(names) + "\n" + ",".join(values) + "\n\n")
    assert database.import_(tmp_path / "a.csv").measurements == 1
    assert database.rows()[0].median_us == 10.0
    assert database.rows()[0].samples == 0


def test_excels_byte_order_mark_and_line_ends_are_no_fault(tmp_path: Path, database: Database) -> None:
    path = tmp_path / "a.csv"
    write_all(rows(3), {}, {}, path)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    assert database.import_(path).measurements == 3


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", b""),
        ("a.csv", b"question,answer\n1,2\n"),
        ("a.csv", b"problem,problem\n"),
        ("a.csv", b"\xff\xfe\x00"),
        ("a.csv.gz", b"problem"),
        ("a.csv.gz", gzip.compress(b"problem,engine", mtime=0)[:-4]),
        ("a.jsonl.gz", b""),
        ("a.jsonl", b""),
        ("a.jsonl", b"\xff\xfe"),
        ("a.jsonl", b"{}\n" * 1100),
        ("a.jsonl", b"x" * (9 << 20)),
        ("a.txt", b"problem"),
        ("a.db", b"SQLite format 3\0"),
    ],
)
def test_what_is_no_export_is_refused_whole(tmp_path: Path, database: Database, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError) as caught:
        database.import_(tmp_path / name)
    assert len(str(caught.value)) < 1500


def test_a_newer_schema_is_refused(tmp_path: Path, database: Database) -> None:
    path = full(tmp_path / "all.jsonl")
    path.write_text(path.read_text().replace(f'"schema_version": {SCHEMA_VERSION}', '"schema_version": 99'))
    assert "newer Convoy" in database.import_(path).refused[0].reason


def test_files_that_cannot_be_read_or_written_are_named(tmp_path: Path, database: Database) -> None:
    for path in (tmp_path / "absent.csv", tmp_path):
        with pytest.raises(InputError):
            database.import_(path)
    (tmp_path / "folder.csv").mkdir()
    for path in (tmp_path / "absent" / "a.csv", tmp_path / "folder.csv", tmp_path / "a.txt"):
        with pytest.raises(InputError):
            database.export(path)
    assert [f.name for f in tmp_path.iterdir()] == ["folder.csv"]


def test_a_failed_export_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = full(tmp_path / "all.csv")
    before = path.read_bytes()

    def full_disk(self: Path, data: bytes) -> int:
        with self.open("wb") as file:
            file.write(data[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full_disk)
    with pytest.raises(InputError, match="No space left"):
        write_all(rows(1), {}, {}, path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_no_line_makes_an_import_crash(tmp_path: Path, data: st.DataObject) -> None:
    """Words of the format in any order, values of any type: taken, refused or InputError, never anything else."""
    values = st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20), st.lists(st.integers())
    )
    names = ["table", "key", "text", "digest", "json", *COLUMNS]
    tables = st.sampled_from(["measurements", "texts", "targets", "database", "x"])
    record = {**data.draw(st.dictionaries(st.sampled_from(names), values)), "table": data.draw(tables)}
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(record) + "\n", encoding="utf-8")
    incoming = read_file(path)
    assert isinstance(incoming, ImportBatch)
    cells = data.draw(st.lists(st.text(max_size=10), min_size=len(COLUMNS), max_size=len(COLUMNS)))
    path = tmp_path / "a.csv"
    body = ",".join(COLUMNS) + "\n" + ",".join(cells) + "\n"
    path.write_bytes(body.encode("utf-8", "replace"))
    assert read_file(path).rows == []


def test_forms_are_told_by_suffix() -> None:
    assert {suffix: file_form(Path("a" + suffix)) for suffix in SUFFIXES} == {
        ".csv": ("csv", False),
        ".csv.gz": ("csv", True),
        ".jsonl": ("jsonl", False),
        ".jsonl.gz": ("jsonl", True),
    }
