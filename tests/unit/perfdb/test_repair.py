"""Damaged files: no wrong number ever, no crash, good rows saved, the bad file moved aside, one warning."""

from __future__ import annotations

import random
import re
import shutil
from contextlib import closing
from pathlib import Path

import pytest

from convoy.perfdb import Database, Measurement, sql
from convoy.perfdb.faults import DamagedFileError, ForeignFileError
from convoy.perfdb.repair import open_sound, read_contents
from tests.unit.perfdb.perfdb_rows import POOL, PROTOCOL, TARGET, bad_files, by_key, failure, raw, row, rows

TRUE_ROWS = [*rows(60), *(failure(i, reason="log " * 900) for i in range(60, 70))]
TEXT = {POOL.key: POOL.text}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The bytes of a good database, of about 25 pages."""
    path = tmp_path_factory.mktemp("whole") / "perf.db"
    with Database.open(path, shipped=False) as database:
        database.put(TRUE_ROWS, TEXT, targets=[TARGET])
    return path.read_bytes()


def opened(path: Path) -> tuple[list[Measurement], list[str]]:
    """All rows that a session sees, asked for in both ways, and what it warns of."""
    with Database.open(path, shipped=False) as database:
        found = database.rows()
        for one in TRUE_ROWS[::30]:
            assert set(database.lookup(one.problem, TARGET.digest, PROTOCOL)) <= {one}
        assert database.text(POOL.key) in (None, POOL.text)
        assert database.target(TARGET.digest) in (None, TARGET)
        database.put([row(999)])
        assert row(999) in database.rows()
        return found, list(database.warnings)


def test_a_figure_that_was_changed_is_never_returned(tmp_path: Path, whole: bytes) -> None:
    """The planted fault that SQLite's own checks cannot see: a valid file with another number in it."""
    path = tmp_path / "perf.db"
    path.write_bytes(whole)
    with raw(path) as connection:
        connection.execute("UPDATE measurements SET median_us = median_us / 2 WHERE problem = ?", (row(5).problem,))
    with Database.open(path, shipped=False) as database:
        assert database.warnings == []  # nobody has looked yet
        assert database.lookup(row(5).problem, TARGET.digest, PROTOCOL) == []
        assert len(database.warnings) == 1
        assert f"{len(TRUE_ROWS) - 1} rows were saved" in database.warnings[0]
        assert by_key(database.rows()) == by_key([r for r in TRUE_ROWS if r != row(5)])
        assert database.text(POOL.key) == POOL.text
        assert database.target(TARGET.digest) == TARGET
        assert len(database.warnings) == 1
        (bad,) = bad_files(path)
        assert re.fullmatch(r"perf\.db\.bad-\d{8}T\d{6}", bad.name)
        assert bad.name in database.warnings[0]


def test_bits_of_every_byte_of_the_header(tmp_path: Path, whole: bytes) -> None:
    path = tmp_path / "perf.db"
    for bit in (8 * byte + bit for byte in range(100) for bit in (0, 6)):
        for file in tmp_path.iterdir():
            file.unlink()
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        with Database.open(path, shipped=False) as database:
            found, warnings = database.rows(), database.warnings
            assert len(warnings) <= 1, bit
            if "is left as it is" in "".join(warnings):
                # Schema version with a bit set: nothing tells it from a newer Convoy's file, which is not to be touched.
                assert 60 <= bit // 8 < 64, bit
                assert path.read_bytes() == data
            else:
                assert by_key(found) == by_key(TRUE_ROWS), bit
                assert len(bad_files(path)) == len(warnings), (bit, warnings)


def test_flipped_bits_anywhere(tmp_path: Path, whole: bytes) -> None:
    """Seeded. A page that a flip hits may lose its rows; no other row is lost, and none is wrong."""
    path = tmp_path / "perf.db"
    rng = random.Random(2)
    moved = 0
    for trial in range(80):
        for file in tmp_path.iterdir():
            file.unlink()
        data = bytearray(whole)
        flips = rng.choice((1, 1, 1, 5))
        for _ in range(flips):
            data[rng.randrange(100, len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        found, warnings = opened(path)
        assert by_key(found).items() <= by_key(TRUE_ROWS).items(), trial
        # A page of 4096 bytes holds at most 14 short rows.
        assert len(found) >= len(TRUE_ROWS) - 14 * flips, trial
        assert len(warnings) == len(bad_files(path)) <= 1, (trial, warnings)
        if len(found) < len(TRUE_ROWS):
            assert warnings, trial
        moved += len(warnings)
        assert opened(path)[1] == []
    assert moved > 40


@pytest.mark.parametrize("kept", [0, 1, 99, 100, 511, 512, 4096, 5000, 0.3, 0.7, 0.95, 1.0])
def test_a_truncated_file(tmp_path: Path, whole: bytes, kept: float) -> None:
    path = tmp_path / "perf.db"
    path.with_name("perf.db.lock").touch()
    length = round(kept * len(whole)) if isinstance(kept, float) else kept
    path.write_bytes(whole[:length])
    found, warnings = opened(path)
    assert by_key(found).items() <= by_key(TRUE_ROWS).items()
    if length == len(whole):
        assert by_key(found) == by_key(TRUE_ROWS)
    # An empty file is what a full disk leaves of a new database: nothing is lost, there is nothing to say.
    assert len(warnings) == len(bad_files(path)) == (0 < length < len(whole))
    if isinstance(kept, float):
        assert len(found) >= (kept - 0.35) * len(TRUE_ROWS)
    assert opened(path)[1] == []


@pytest.mark.parametrize("content", [b"\0" * 8192, b"problem,engine\n", b"SQLite format 3\0", bytes(range(256)) * 64])
def test_not_a_database(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "perf.db"
    path.with_name("perf.db.lock").touch()
    path.write_bytes(content)
    found, warnings = opened(path)
    assert found == []
    assert len(warnings) == 1
    assert bad_files(path)[0].read_bytes() == content


@pytest.mark.parametrize("content", [b"problem,engine\n", bytes(range(256)) * 64])
def test_a_file_that_convoy_never_wrote_stays_where_it_is(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "net.safetensors"
    path.write_bytes(content)
    for _ in range(2):
        found, warnings = opened(path)
        assert found == []
        assert len(warnings) == 1
        assert "it is no database" in warnings[0]
    assert path.read_bytes() == content
    assert list(tmp_path.iterdir()) == [path]


def test_an_empty_file_beside_a_log_gives_the_logs_rows(tmp_path: Path) -> None:
    source, path = tmp_path / "source.db", tmp_path / "perf.db"
    with Database.open(source, shipped=False) as database:
        database.put(TRUE_ROWS)
        shutil.copyfile(f"{source}-wal", f"{path}-wal")
    path.touch()
    found, warnings = opened(path)
    assert by_key(found) == by_key(TRUE_ROWS)
    assert len(warnings) == 1


def test_rows_in_the_log_of_a_damaged_file_are_saved(tmp_path: Path) -> None:
    source, path = tmp_path / "source.db", tmp_path / "perf.db"
    with Database.open(source, shipped=False) as database:
        database.put(rows(50))
        for suffix in ("", "-wal"):
            shutil.copyfile(f"{source}{suffix}", f"{path}{suffix}")
    path.write_bytes(b"X" * 100 + path.read_bytes()[100:])
    found, warnings = opened(path)
    assert by_key(found) == by_key(rows(50))
    assert len(warnings) == 1
    assert (bad_files(path)[0].with_name(bad_files(path)[0].name + "-wal")).exists()


def test_damage_that_comes_while_the_file_is_open(tmp_path: Path, whole: bytes) -> None:
    path = tmp_path / "perf.db"
    path.write_bytes(whole)
    with Database.open(path, shipped=False) as database:
        with path.open("r+b") as file:
            for page in range(2, len(whole) // 4096, 5):
                file.seek(page * 4096)
                file.write(b"\xa5" * 200)
        connection = database._store._connection
        assert connection is not None
        connection.execute("PRAGMA shrink_memory")  # what is cached would hide it
        found = database.rows()
        assert by_key(found).items() <= by_key(TRUE_ROWS).items()
        assert len(found) > len(TRUE_ROWS) / 2
        database.put([row(999)])
        assert len(database.warnings) == len(bad_files(path)) == 1


def test_a_dropped_table_is_damage(tmp_path: Path, whole: bytes) -> None:
    path = tmp_path / "perf.db"
    path.write_bytes(whole)
    with raw(path) as connection:
        connection.execute("DROP TABLE texts")
    found, warnings = opened(path)
    assert by_key(found) == by_key(TRUE_ROWS)
    assert len(warnings) == 1


def test_two_bad_files_in_one_second_have_two_names(tmp_path: Path) -> None:
    path = tmp_path / "perf.db"
    path.with_name("perf.db.lock").touch()
    for content in (b"first", b"second", b"third"):
        path.write_bytes(content)
        assert len(opened(path)[1]) == 1
    assert {f.read_bytes() for f in bad_files(path)} == {b"first", b"second", b"third"}


@pytest.mark.parametrize("logged", [False, True])
def test_a_file_of_a_newer_version_is_left_untouched(tmp_path: Path, whole: bytes, logged: bool) -> None:
    path = tmp_path / "perf.db"
    path.write_bytes(whole)
    if logged:
        with closing(sql.connect(path)) as connection:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA user_version = 99")
            for suffix in ("", "-wal"):
                shutil.copyfile(f"{path}{suffix}", tmp_path / f"newer.db{suffix}")
        path = tmp_path / "newer.db"
    else:
        with raw(path) as connection:
            connection.execute("PRAGMA user_version = 99")
    before = path.read_bytes()
    found, warnings = opened(path)
    assert found == []
    assert len(warnings) == 1
    assert "99" in warnings[0]
    assert bad_files(path) == []
    assert logged or path.read_bytes() == before
    with closing(sql.connect_read_only(path)) as connection:
        assert sql.schema_version(connection) == 99
        assert sql.count(connection, {}) == len(TRUE_ROWS)
    with pytest.raises(ForeignFileError):
        read_contents(path)


def test_another_programs_database_is_left_untouched(tmp_path: Path) -> None:
    path = tmp_path / "places.sqlite"
    with raw(path) as connection:
        connection.execute("CREATE TABLE texts (title)")
        connection.execute("INSERT INTO texts VALUES ('theirs')")
        connection.execute("PRAGMA user_version = 1")
    before = path.read_bytes()
    found, warnings = opened(path)
    assert found == []
    assert len(warnings) == 1
    assert "another program" in warnings[0]
    assert path.read_bytes() == before


def test_checks_of_a_sound_file_pass_and_of_a_damaged_one_fail(tmp_path: Path, whole: bytes) -> None:
    path = tmp_path / "perf.db"
    path.write_bytes(whole)
    open_sound(path, write_ahead=False).close()
    assert read_contents(path).damage == ""
    data = bytearray(whole)
    data[4096:8192] = bytes(4096)
    path.write_bytes(data)
    with pytest.raises((DamagedFileError, sql.sqlite3.DatabaseError)):
        open_sound(path, write_ahead=False)
    assert read_contents(path).damage != ""
    assert path.read_bytes() == data


def test_an_older_file_is_read_without_being_changed(tmp_path: Path) -> None:
    path = tmp_path / "old.db"
    with raw(path) as connection:
        connection.executescript((Path(__file__).parent / "version_1.sql").read_text(encoding="utf-8"))
    before = path.read_bytes()
    contents = read_contents(path)
    assert (len(contents.records), contents.texts, contents.damage) == (3, TEXT, "")
    assert path.read_bytes() == before
