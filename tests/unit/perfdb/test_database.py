"""The interface: lookup, put, rows, info, clear, merge, and which rows win."""

from __future__ import annotations

import dataclasses
import gzip
import json
from pathlib import Path

import pytest

from convoy.errors import InputError
from convoy.perfdb import Database, DatabaseInfo, shipped
from convoy.perfdb.record import MAX_CHARACTERS
from convoy.problem import EngineConfig, Knobs
from tests.unit.perfdb.perfdb_rows import OTHER, POOL, PROTOCOL, TARGET, failure, raw, row, rows


@pytest.fixture
def database():
    with Database.memory() as found:
        yield found


def test_what_was_put_is_found_again_after_the_session(tmp_path: Path) -> None:
    with Database.open(tmp_path / "deep" / "er" / "perf.db") as first:
        first.put([row(0), failure(1)], {POOL.key: POOL.text}, targets=[TARGET])
    with Database.open(tmp_path / "deep" / "er" / "perf.db") as second:
        assert second.lookup(row(0).problem, TARGET.digest, PROTOCOL) == [row(0)]
        assert second.lookup(failure(1).problem, TARGET.digest, PROTOCOL) == [failure(1)]
        assert second.text(POOL.key) == POOL.text
        assert second.text("subgraph:nchw:" + "0" * 24) is None
        assert second.target(TARGET.digest) == TARGET
        assert second.target(OTHER.digest) is None
        assert second.warnings == []


def test_a_row_is_never_trusted_for_another_target_or_protocol(database: Database) -> None:
    database.put([row(0)])
    assert database.lookup(row(0).problem, OTHER.digest, PROTOCOL) == []
    assert database.lookup(row(0).problem, TARGET.digest, "full-1") == []
    assert database.lookup(row(1).problem, TARGET.digest, PROTOCOL) == []


@pytest.mark.parametrize(
    "change",
    [
        {"problem": row(1).problem},
        {"target": OTHER.digest},
        {"protocol": "full-1"},
        {"config": EngineConfig("aten", 1, row(0).config.knobs)},
        {"config": EngineConfig("triton.implicit_gemm", 2, row(0).config.knobs)},
        {"config": EngineConfig("triton.implicit_gemm", 1, Knobs.of(block_m=32))},
    ],
)
def test_each_part_of_the_key_makes_another_row(database: Database, change: dict[str, object]) -> None:
    other = row(0, **change)
    database.put([row(0)])
    database.put([other])
    assert len(database.rows()) == 2
    assert row(0) in database.rows()
    assert other in database.rows()


def test_the_same_key_written_again_replaces(database: Database) -> None:
    database.put([row(0)])
    database.put([row(0, median_us=3.5), failure(1)])
    database.put([failure(0), row(1)])
    assert database.lookup(row(0).problem, TARGET.digest, PROTOCOL) == [failure(0)]
    assert len(database.rows()) == 2


def test_put_takes_all_or_nothing(database: Database) -> None:
    for wrong in (row(1, median_us=float("nan")), row(1, target="here"), failure(1, reason="")):
        with pytest.raises(InputError):
            database.put([row(0), wrong])
    with pytest.raises(InputError):
        database.put([row(0)], {POOL.key: "another text"})
    assert database.rows() == []


def test_a_long_compiler_log_is_cut(database: Database) -> None:
    database.put([failure(0, reason="error: " + "x" * 10_000 + "\udcff")])
    (found,) = database.rows()
    assert len(found.reason) == MAX_CHARACTERS["reason"]
    assert found.reason.startswith("error: xxx")


def test_rows_are_filtered_and_ordered(database: Database) -> None:
    slow = row(0, config=EngineConfig("aten"), median_us=99.0)
    bad = failure(0, config=EngineConfig("fft"))
    there = row(0, target=OTHER.digest)
    database.put([bad, slow, row(0), row(1), there])
    here = [row(0), slow, bad, row(1)]
    assert database.rows(target=TARGET.digest) == here
    assert database.rows(target=TARGET.digest[:6]) == here
    assert database.rows(target=TARGET.digest, limit=2) == here[:2]
    assert database.rows(limit=0) == []
    assert database.rows(engine="aten") == [slow]
    assert database.rows(engine="aten", status="compile_error") == []
    assert database.rows(status="compile_error") == [bad]
    assert database.rows(problem="k1001") == [row(1)]
    assert database.rows(problem="%") == []
    assert database.rows(problem="' OR 1 --") == []
    assert database.count() == 5
    assert database.count(target=OTHER.digest) == 1
    assert database.lookup(row(0).problem, TARGET.digest, PROTOCOL) == [slow, bad, row(0)]
    for wrong in ({"status": "fine"}, {"limit": -1}):
        with pytest.raises(InputError):
            database.rows(**wrong)  # type: ignore[arg-type]


def test_clear_removes_one_engine_one_target_or_everything(tmp_path: Path) -> None:
    with Database.open(tmp_path / "perf.db", shipped=False) as database:
        aten, there = row(0, config=EngineConfig("aten")), row(0, target=OTHER.digest)
        database.put([*rows(300), aten, there], {POOL.key: POOL.text})
        size = (tmp_path / "perf.db").stat().st_size
        assert database.clear(engine="fft") == 0
        assert database.clear(engine="aten") == 1
        assert database.clear(engine="triton.implicit_gemm", target=OTHER.digest) == 1
        assert database.rows() == rows(300)
        for short in (TARGET.digest[:6], "%", "x" * 16):
            with pytest.raises(InputError):
                database.clear(target=short)
        assert database.clear(target=TARGET.digest) == 300
        assert database.text(POOL.key) == POOL.text
        database.put(rows(2))
        assert database.clear() == 2
        assert database.rows() == []
        assert database.text(POOL.key) is None
    assert (tmp_path / "perf.db").stat().st_size < max(size / 2, 40_000)


def test_cleared_rows_are_gone_from_the_file(tmp_path: Path) -> None:
    """Salvage reads pages by hand: nothing that was deleted may come back by it."""
    path = tmp_path / "perf.db"
    with Database.open(path, shipped=False) as database:
        database.put(rows(300))
        database.clear(engine="triton.implicit_gemm")
        database.put([row(7, median_us=1.5)])
    path.write_bytes(b"X" + path.read_bytes()[1:])
    with Database.open(path, shipped=False) as database:
        assert database.rows() == [row(7, median_us=1.5)]
        assert len(database.warnings) == 1


def test_info_counts_and_is_plain_data(tmp_path: Path) -> None:
    with Database.open(tmp_path / "perf.db") as database:
        database.put([row(0), failure(1), row(1, target=OTHER.digest)], {POOL.key: POOL.text}, targets=[TARGET])
        info = database.info()
    assert isinstance(info, DatabaseInfo)
    assert info.path == str(tmp_path / "perf.db")
    assert not info.in_memory
    assert info.size_bytes > 0
    assert (info.measurements, info.texts) == (3, 1)
    assert info.status == {"ok": 2, "compile_error": 1}
    assert info.engine == {"triton.implicit_gemm": 3}
    assert info.target == {TARGET.digest: 2, OTHER.digest: 1}
    assert info.targets == {TARGET.digest: TARGET.name}
    assert info.shipped == tuple(shipped.shipped_targets())
    assert json.loads(json.dumps(info.to_dict()))["measurements"] == 3


@pytest.mark.parametrize("path", [".", "/dev/null", "a\0b", "x" * 300])
def test_a_path_that_can_be_no_file_is_refused(path: str) -> None:
    with pytest.raises(InputError) as caught:
        Database.open(Path(path))
    assert caught.value.argument == "db"


def test_the_environment_moves_the_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONVOY_DB", str(tmp_path / "moved.db"))
    with Database.open() as database:
        assert database.path == tmp_path / "moved.db"
    monkeypatch.setenv("HOME", str(tmp_path))
    with Database.open(Path("~/own.db")) as database:
        assert database.path == tmp_path / "own.db"


# Shipped results


@pytest.fixture
def shipped_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "shipped"
    shipped.write_shipped([row(0, median_us=1.0), row(1), failure(2), row(3, target=OTHER.digest)], folder)
    monkeypatch.setattr(shipped, "shipped_folder", lambda: folder)
    return folder


def test_the_users_rows_win_over_shipped_ones(shipped_rows: Path) -> None:
    other = row(0, config=EngineConfig("aten"), median_us=77.0)
    with Database.memory(shipped=True) as database:
        database.put([row(0), other])
        assert database.lookup(row(0).problem, TARGET.digest, PROTOCOL) == [other, row(0)]
        assert database.lookup(row(1).problem, TARGET.digest, PROTOCOL) == [row(1)]
        assert database.lookup(failure(2).problem, TARGET.digest, PROTOCOL) == [failure(2)]
        assert database.lookup(row(3).problem, TARGET.digest, PROTOCOL) == []
        assert database.lookup(row(3).problem, OTHER.digest, PROTOCOL) == [row(3, target=OTHER.digest)]
        assert database.lookup(row(1).problem, TARGET.digest, "full-1") == []
        assert len(database.rows()) == 2
        assert set(database.info().shipped) == {TARGET.digest, OTHER.digest}
        database.clear()
        assert database.lookup(row(0).problem, TARGET.digest, PROTOCOL) == [row(0, median_us=1.0)]
    with Database.memory(shipped=False) as database:
        assert database.lookup(row(1).problem, TARGET.digest, PROTOCOL) == []


def test_rows_that_ship_for_a_cpu_predict_and_are_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = dataclasses.replace(TARGET, device="cuda", name="A made-up GPU", arch="sm_90a")
    of_gpu = row(1, target=gpu.digest)
    shipped.write_shipped([row(0), row(1), of_gpu], tmp_path, {t.digest: t for t in (TARGET, gpu)})
    monkeypatch.setattr(shipped, "shipped_folder", lambda: tmp_path)
    with Database.memory(shipped=True) as database:
        database.put([row(0, median_us=5.0)])
        assert database.lookup(row(1).problem, TARGET.digest, PROTOCOL) == [row(1)]
        assert database.measured(row(1).problem, TARGET.digest, PROTOCOL) == []
        assert database.measured(row(0).problem, TARGET.digest, PROTOCOL) == [row(0, median_us=5.0)]
        assert database.measured(row(1).problem, gpu.digest, PROTOCOL) == [of_gpu]


def test_a_damaged_shipped_file_is_one_warning(shipped_rows: Path) -> None:
    (shipped_rows / f"{TARGET.digest}.rows.gz").write_bytes(b"\x1f\x8b garbage")
    with Database.memory(shipped=True) as database:
        assert database.lookup(row(1).problem, TARGET.digest, PROTOCOL) == []
        assert database.lookup(row(0).problem, TARGET.digest, PROTOCOL) == []
        assert len(database.warnings) == 1
        assert TARGET.digest in database.warnings[0]
        assert database.lookup("conv", "../../../etc/x", PROTOCOL) == []


def test_shipped_rows_are_checked_when_they_are_asked_for(shipped_rows: Path) -> None:
    """A good problem is served; with the first bad one the whole file is out of use, which is one warning."""
    path = shipped_rows / f"{TARGET.digest}.rows.gz"
    data = gzip.decompress(path.read_bytes())
    path.write_bytes(gzip.compress(data.replace(str(row(1).config).encode(), b"splendid")))
    with Database.memory(shipped=True) as database:
        assert database.lookup(row(0).problem, TARGET.digest, PROTOCOL) == [row(0, median_us=1.0)]
        assert database.warnings == []
        assert database.lookup(row(1).problem, TARGET.digest, PROTOCOL) == []
        assert database.lookup(row(0).problem, TARGET.digest, PROTOCOL) == []
        assert len(database.warnings) == 1
        assert "splendid" in database.warnings[0]
        assert "row 1" in database.warnings[0]


# Merge


def test_merge_takes_the_newest_facts_and_leaves_the_source_alone(tmp_path: Path) -> None:
    source, path = tmp_path / "theirs.db", tmp_path / "ours.db"
    newer, older = row(0, median_us=1.0, date="2027-01-01"), row(1, median_us=2.0, date="2025-01-01")
    with Database.open(source, shipped=False) as theirs:
        theirs.put([newer, older, row(2)], {POOL.key: POOL.text}, targets=[TARGET])
    before, names = source.read_bytes(), {f.name for f in tmp_path.iterdir()}
    with Database.open(path, shipped=False) as ours:
        ours.put([row(0), row(1)])
        done = ours.merge(source)
        assert dataclasses.astuple(done) == (2, 1, 1, 1, ())
        assert ours.rows() == [newer, row(1), row(2)]
        assert ours.target(TARGET.digest) == TARGET
        assert ours.text(POOL.key) == POOL.text
        assert dataclasses.astuple(ours.merge(source))[:2] == (0, 3)
    assert source.read_bytes() == before
    assert {f.name for f in tmp_path.iterdir()} - names == {"ours.db", "ours.db.lock"}


def test_merge_sees_rows_of_a_session_that_is_still_running(tmp_path: Path, database: Database) -> None:
    with Database.open(tmp_path / "theirs.db", shipped=False) as theirs:
        theirs.put(rows(5))
        assert database.merge(tmp_path / "theirs.db").measurements == 5
        theirs.put([row(5)])
    assert database.rows() == rows(5)


def test_merge_of_a_damaged_database_takes_its_good_rows_only_if_told_to(tmp_path: Path, database: Database) -> None:
    source = tmp_path / "theirs.db"
    with Database.open(source, shipped=False) as theirs:
        theirs.put(rows(10))
    with raw(source) as connection:
        connection.execute("UPDATE measurements SET error = 0.5 WHERE rowid = 4")
    before = source.read_bytes()
    done = database.merge(source)
    assert done.measurements == 0
    assert len(done.refused) == 1
    assert database.rows() == []
    done = database.merge(source, partial=True)
    assert done.measurements == 9
    assert database.rows() == [r for r in rows(10) if r != row(3)]
    assert source.read_bytes() == before


def test_merge_refuses_rows_with_a_true_seal_and_a_false_value(tmp_path: Path, database: Database) -> None:
    from convoy.perfdb import sql
    from convoy.perfdb.record import to_record

    source = tmp_path / "theirs.db"
    with Database.open(source, shipped=False) as theirs:
        theirs._store.write(
            lambda c: sql.put_records(
                c, [to_record(row(0)), {**to_record(row(1)), "engine": "rm -rf"}, to_record(row(2))]
            )
        )
    done = database.merge(source)
    assert [(refusal.line, "engine" in refusal.reason) for refusal in done.refused] == [(2, True)]
    assert database.rows() == []
    assert database.merge(source, partial=True).measurements == 2


@pytest.mark.parametrize("content", [None, b"", b"text", b"\0" * 5000])
def test_merge_of_what_is_no_database_is_refused(tmp_path: Path, database: Database, content: bytes | None) -> None:
    source = tmp_path / "theirs.db"
    if content is not None:
        source.write_bytes(content)
    with pytest.raises(InputError):
        database.merge(source)
    assert list(tmp_path.iterdir()) == ([source] if content is not None else [])
    with pytest.raises(InputError):
        database.merge(tmp_path)


def test_a_database_is_not_merged_with_itself_or_a_newer_one(tmp_path: Path) -> None:
    with Database.open(tmp_path / "perf.db", shipped=False) as database:
        database.put([row(0)])
        with pytest.raises(InputError):
            database.merge(tmp_path / "perf.db")
        (tmp_path / "link.db").symlink_to(tmp_path / "perf.db")
        with pytest.raises(InputError):
            database.merge(tmp_path / "link.db")
        with Database.open(tmp_path / "newer.db"):
            pass
        with raw(tmp_path / "newer.db") as connection:
            connection.execute("PRAGMA user_version = 99")
        with pytest.raises(InputError, match="99"):
            database.merge(tmp_path / "newer.db")
