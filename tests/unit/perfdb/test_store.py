"""The file in use: many processes and threads, forks, interrupts, a full disk, read-only files and folders, replacement."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import stat
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from convoy.errors import DatabaseError
from convoy.perfdb import Database, sql
from convoy.perfdb.store import DatabaseFile
from tests.unit.perfdb.perfdb_rows import POOL, PROTOCOL, TARGET, bad_files, by_key, finish, raw, row, rows, start

NOBODY = 65534


def fill(path: Path, count: int = 100) -> None:
    with Database.open(path, shipped=False) as database:
        database.put(rows(count), {POOL.key: POOL.text}, targets=[TARGET])


def spoil(path: Path) -> None:
    """Overwrite one stored figure, as a bit flip on the disk would."""
    with raw(path) as connection:
        connection.execute("UPDATE measurements SET median_us = 0.001 WHERE rowid = 50")


@contextmanager
def unprivileged() -> Iterator[None]:
    """Root may write anywhere: for a while, be nobody."""
    if os.geteuid():
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that nobody else owns and that every user can reach, unlike pytest's own."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o777)
    yield folder
    folder.chmod(0o777)
    shutil.rmtree(folder)


# Many at once

WRITER = """
import sys
from pathlib import Path
from convoy.perfdb import Database
from tests.unit.perfdb.perfdb_rows import row
first = int(sys.argv[2])
print("ready", flush=True)
sys.stdin.readline()
with Database.open(Path(sys.argv[1])) as database:
    for index in range(first, first + 10):
        database.put([row(index)])
    print(len(database.warnings), database.in_memory)
"""


@pytest.mark.parametrize("before", ["absent", "sound", "damaged"])
def test_sixteen_processes_write_at_once(tmp_path: Path, before: str) -> None:
    path = tmp_path / "perf.db"
    if before != "absent":
        fill(path)
    if before == "damaged":
        spoil(path)
        data = bytearray(path.read_bytes())
        data[4096 * 3 : 4096 * 3 + 16] = b"\xff" * 16
        path.write_bytes(data)
    writers = [start(WRITER, path, 1000 + 10 * i) for i in range(16)]
    for writer in writers:
        assert writer.stdout is not None
        assert writer.stdin is not None
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:
        writer.stdin.write("go\n")  # type: ignore[union-attr]
        writer.stdin.flush()  # type: ignore[union-attr]
    said = [finish(writer).split() for writer in writers]
    assert all(in_memory == "False" for _, in_memory in said)
    assert sum(int(warnings) for warnings, _ in said) == (before == "damaged")
    assert len(bad_files(path)) == (before == "damaged")
    with Database.open(path, shipped=False) as database:
        assert database.warnings == []
        found = by_key(database.rows())
    assert found.items() >= by_key([row(1000 + i) for i in range(160)]).items()
    old = {key: r for key, r in found.items() if key in by_key(rows(100))}
    assert old.items() <= by_key(rows(100)).items()
    assert len(old) >= {"absent": 0, "sound": 100, "damaged": 70}[before]


def test_threads_share_a_database(tmp_path: Path) -> None:
    failures: list[BaseException] = []
    with Database.open(tmp_path / "perf.db", shipped=False) as database:

        def work(first: int) -> None:
            try:
                for index in range(first, first + 20):
                    database.put([row(index)])
                    assert database.lookup(row(index).problem, TARGET.digest, PROTOCOL) == [row(index)]
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(100 * i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        assert database.info().measurements == 160


def test_a_forked_child_writes_through_a_connection_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "perf.db"
    with Database.open(path, shipped=False) as database:
        database.put([row(0)])
        parents = database._store._connection
        child = os.fork()
        if child == 0:  # pragma: no cover - another process
            code = 1
            try:
                database.put([row(1)])
                code = 0 if database.rows() == [row(0), row(1)] and database._store._connection is not parents else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        database.put([row(2)])
        assert database.rows() == rows(3)
    with Database.open(path, shipped=False) as database:
        assert database.rows() == rows(3)
        assert database.warnings == []


# Interrupts

ENDLESS = """
import sys
from pathlib import Path
from convoy.perfdb import Database
from tests.unit.perfdb.perfdb_rows import row
with Database.open(Path(sys.argv[1])) as database:
    for index in range(10**6):
        database.put([row(index)])
        print(index, flush=True)
"""


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupt_keeps_what_was_put(tmp_path: Path, kind: signal.Signals) -> None:
    path = tmp_path / "perf.db"
    process = start(ENDLESS, path)
    assert process.stdout is not None
    assert process.stderr is not None
    for expected in range(40):
        assert process.stdout.readline() == f"{expected}\n"
    process.send_signal(kind)
    put = 40 + process.stdout.read().count("\n")
    err = process.stderr.read()
    assert process.wait(60) != 0
    assert kind is signal.SIGKILL or "KeyboardInterrupt" in err
    with Database.open(path, shipped=False) as database:
        assert database.warnings == []
        found = database.rows()
    assert found == rows(len(found))
    assert len(found) in (put, put + 1)  # the last may have been put, but not yet printed


# No room, no permission


def test_a_full_disk_keeps_the_session_going_and_loses_no_row(tmp_path: Path) -> None:
    path = tmp_path / "perf.db"
    fill(path, 50)
    database = Database.open(path, shipped=False)
    connection = database._store._connection
    assert connection is not None
    pages = connection.execute("PRAGMA page_count").fetchone()[0]
    connection.execute(f"PRAGMA max_page_count = {pages}")
    for index in range(50, 150):
        database.put([row(index)])
    assert database.in_memory
    assert len(database.warnings) == 1
    assert "full" in database.warnings[0]
    assert database.rows() == rows(150)
    with raw(path) as file:
        assert 50 <= file.execute("SELECT count(*) FROM measurements").fetchone()[0] < 150
    database.close()
    with Database.open(path, shipped=False) as again:  # there was room again when the session ended
        assert again.rows() == rows(150)
        assert again.warnings == []


LIMITED = """
import resource, sys
from pathlib import Path
from convoy.perfdb import Database
from tests.unit.perfdb.perfdb_rows import row, rows
path, limit = Path(sys.argv[1]), int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
with Database.open(path) as database:
    for index in range(5000, 5400):
        database.put([row(index)])
    found = database.rows()
    assert [r for r in found if r in rows(100)], "old rows"
    assert set(row(i) for i in range(5000, 5400)) <= set(found), "new rows"
    print(len(found), len(database.warnings), database.in_memory)
"""


@pytest.mark.parametrize("limit", [0, 60_000, 100_000])
def test_a_disk_quota_is_a_warning(tmp_path: Path, limit: int) -> None:
    path = tmp_path / "perf.db"
    fill(path)
    assert finish(start(LIMITED, path, limit)).split() == ["500", "1", "True"]
    with Database.open(path, shipped=False) as database:
        assert database.warnings == []
        assert by_key(database.rows()).items() >= by_key(rows(100)).items()


def test_a_damaged_file_without_room_for_a_new_one_stays_where_it_is(tmp_path: Path) -> None:
    path = tmp_path / "perf.db"
    fill(path)
    spoil(path)
    before = path.read_bytes()
    assert finish(start(LIMITED, path, 8192)).split() == ["499", "1", "True"]
    assert path.read_bytes() == before
    assert bad_files(path) == []
    assert not list(tmp_path.glob("*.new-*"))


@pytest.mark.parametrize("case", ["file", "folder", "both", "damaged", "unreachable", "no folder"])
def test_without_permission_the_session_works_in_memory(open_folder: Path, case: str) -> None:
    folder = open_folder / "cache"
    folder.mkdir()
    path = folder / "perf.db"
    fill(path)
    if case == "damaged":
        spoil(path)
    for file in folder.iterdir():
        file.chmod(0o444 if case != "folder" else 0o666)
    folder.chmod({"file": 0o777, "unreachable": 0o000}.get(case, 0o555))
    if case == "no folder":
        path = folder / "deeper" / "perf.db"
    before = {f.name: f.read_bytes() for f in folder.iterdir()} if case != "unreachable" or not os.geteuid() else {}
    readable = {"unreachable": 0, "no folder": 0, "damaged": 99}.get(case, 100)
    with unprivileged(), Database.open(path, shipped=False) as database:
        assert database.in_memory
        assert len(database.warnings) == 1, database.warnings
        assert str(path) in database.warnings[0]
        database.put([row(500)])
        assert len(database.rows()) == readable + 1
        assert by_key(database.rows()).items() <= by_key([*rows(100), row(500)]).items()
        assert database.lookup(row(500).problem, TARGET.digest, PROTOCOL) == [row(500)]
        assert (database.text(POOL.key) is not None) == bool(readable)
        assert len(database.warnings) == 1
    folder.chmod(0o755)
    assert {f.name: f.read_bytes() for f in folder.iterdir()} == before


def test_a_read_only_file_with_rows_in_its_log_is_read_with_them(open_folder: Path) -> None:
    """A writer died; nobody may write here, so SQLite itself cannot even make its shared memory."""
    source, folder = open_folder / "source.db", open_folder / "cache"
    folder.mkdir()
    with Database.open(source, shipped=False) as database:
        database.put(rows(20))
        for suffix in ("", "-wal"):
            shutil.copyfile(f"{source}{suffix}", folder / f"perf.db{suffix}")
    assert (folder / "perf.db-wal").stat().st_size > 0
    for file in folder.iterdir():
        file.chmod(0o444)
    folder.chmod(0o555)
    with unprivileged(), Database.open(folder / "perf.db", shipped=False) as database:
        assert database.rows() == rows(20)
        assert len(database.warnings) == 1
    folder.chmod(0o755)


def test_a_lock_held_for_too_long_sends_the_session_into_memory(tmp_path: Path) -> None:
    path = tmp_path / "perf.db"
    fill(path, 3)
    store = DatabaseFile(path, timeout_s=0.05)
    with sql.exclusive(tmp_path / "perf.db.lock"):
        store.write(lambda connection: sql.put_records(connection, []))
        assert store.in_memory
        assert len(store.warnings) == 1
        assert store.read(lambda connection: sql.select(connection, {})) == rows(3)
    store.close()


def test_a_lock_file_that_somebody_wrote_into_is_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "perf.db"
    fill(path, 3)
    (tmp_path / "perf.db.lock").write_text("not empty " * 100)
    with Database.open(path, shipped=False) as database:
        assert database.rows() == rows(3)
        assert len(database.warnings) == 1
        database.put([row(3)])
        assert database.rows() == rows(4)


def test_the_lock_of_a_process_that_was_killed_is_free(tmp_path: Path) -> None:
    holder = start(
        "import sys\nfrom pathlib import Path\nfrom convoy.perfdb import sql\n"
        "with sql.exclusive(Path(sys.argv[1])):\n    print('held', flush=True)\n    sys.stdin.readline()\n",
        tmp_path / "perf.db.lock",
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(sqlite3.OperationalError, match="locked"), sql.exclusive(tmp_path / "perf.db.lock", 0.05):
        pass
    holder.kill()
    holder.communicate()
    with sql.exclusive(tmp_path / "perf.db.lock", 5):
        pass


# Another file in the same place


def test_sessions_follow_a_file_that_another_one_mended(tmp_path: Path) -> None:
    path = tmp_path / "perf.db"
    fill(path)
    with Database.open(path, shipped=False) as early, Database.open(path, shipped=False) as other:
        early.put([row(200)])
        spoil(path)
        with Database.open(path, shipped=False) as finder:
            assert len(finder.rows()) == 100  # 101, and one is spoilt
            assert len(finder.warnings) == 1
            other.put([row(201)])
            assert by_key(early.rows()) == by_key(finder.rows())
            early.put([row(202)])
            assert len(finder.rows()) == 102
        assert early.warnings == other.warnings == []
    # The old connections are closed: they must not have taken the new file's log with them.
    with Database.open(path, shipped=False) as database:
        expected = [r for r in rows(100) if r != row(49)] + [row(200), row(201), row(202)]
        assert by_key(database.rows()) == by_key(expected)
    assert len(bad_files(path)) == 1


def test_a_file_replaced_while_a_writer_waited_for_the_lock_gets_the_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, mended = tmp_path / "perf.db", tmp_path / "mended.db"
    fill(mended, 2)
    lock = sql.exclusive
    with Database.open(path, shipped=False) as database:
        database.put([row(1)])

        @contextmanager
        def late(where: Path, timeout_s: float = 30.0) -> Iterator[None]:
            monkeypatch.setattr(sql, "exclusive", lock)
            for suffix in ("-wal", "-shm"):
                Path(f"{path}{suffix}").rename(tmp_path / f"bad{suffix}")
            path.rename(tmp_path / "bad")
            mended.rename(path)
            with lock(where, timeout_s):
                yield

        monkeypatch.setattr(sql, "exclusive", late)
        database.put([row(2)])
        assert database.rows() == rows(3)
    with Database.open(path, shipped=False) as database:
        assert database.rows() == rows(3)
        assert database.warnings == []


def test_a_deleted_file_is_made_anew(tmp_path: Path) -> None:
    path = tmp_path / "perf.db"
    with Database.open(path, shipped=False) as database:
        database.put(rows(3))
        for file in tmp_path.iterdir():
            file.unlink()
        database.put([row(7)])
        assert database.rows() == [row(7)]
        assert database.warnings == []
    assert path.exists()


def test_a_closed_database_says_so(tmp_path: Path) -> None:
    database = Database.open(tmp_path / "perf.db")
    database.close()
    database.close()
    for use in (database.rows, database.info, lambda: database.put([row(0)])):
        with pytest.raises(DatabaseError, match="closed"):
            use()


def test_no_file_is_made_for_a_look(tmp_path: Path) -> None:
    with Database.open(tmp_path / "perf.db", create=False) as database:
        assert database.rows() == []
        assert database.in_memory
        assert database.warnings == []
    assert list(tmp_path.iterdir()) == []


def test_the_log_is_written_ahead_where_the_file_system_is_our_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "perf.db"
    with Database.open(path) as database:
        database.put(rows(2))
        assert database.info().journal == "wal"
    monkeypatch.setattr("convoy.perfdb.store.on_shared_file_system", lambda _: True)
    with Database.open(path, shipped=False) as database:
        assert database.info().journal == "delete"
        database.put([row(2)])
        assert database.rows() == rows(3)


def test_files_of_the_database_are_only_these(tmp_path: Path) -> None:
    fill(tmp_path / "perf.db")
    assert sorted(f.name for f in tmp_path.iterdir()) == ["perf.db", "perf.db.lock"]
    assert (tmp_path / "perf.db.lock").stat().st_size == 0
    assert stat.S_ISREG((tmp_path / "perf.db").stat().st_mode)
