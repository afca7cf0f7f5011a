"""Shipped results: written deterministically, read lazily and checked."""

from __future__ import annotations

import gzip
from dataclasses import replace
from pathlib import Path

import pytest

from convoy.errors import InputError
from convoy.perfdb import Database, Measurement, shipped, shipped_table
from convoy.perfdb.shipped import read_shipped, shipped_descriptions, shipped_folder, shipped_targets, write_shipped
from convoy.perfdb.time_columns import TimeColumns
from convoy.problem import SubgraphProblem
from convoy.target import Target
from tests.unit.perfdb.perfdb_rows import OTHER, TARGET, failure, row, rows


def said(times: TimeColumns) -> list[tuple[object, ...]]:
    """What columns of times say, row by row."""
    problems = [times.problems.keys[place] for place in times.problem]
    columns = (times.configs.entries(), times.median_us.tolist(), times.samples.tolist(), times.deterministic.tolist())
    return list(zip(problems, *columns, strict=True))


def test_a_target_has_one_file_in_the_order_of_problems(tmp_path: Path) -> None:
    paths = write_shipped([row(1), row(0, target=OTHER.digest), failure(2), row(0)], tmp_path / "new")
    assert paths == sorted(tmp_path / "new" / f"{t.digest}.rows.gz" for t in (TARGET, OTHER))
    assert read_shipped(TARGET.digest, tmp_path / "new") == [row(0), row(1), failure(2)]
    assert shipped_targets(tmp_path / "new") == sorted([TARGET.digest, OTHER.digest])


def test_equal_rows_give_equal_bytes(tmp_path: Path) -> None:
    (first,) = write_shipped(rows(9), tmp_path / "a")
    (second,) = write_shipped(reversed(rows(9)), tmp_path / "b")
    assert first.read_bytes() == second.read_bytes()


def test_the_database_exports_it(tmp_path: Path) -> None:
    with Database.memory() as database:
        database.put([row(0), row(1), row(2, target=OTHER.digest)])
        assert len(database.export_shipped(tmp_path, target=TARGET.digest)) == 1
        assert read_shipped(TARGET.digest, tmp_path) == [row(0), row(1)]
        assert len(database.export_shipped(tmp_path)) == 2


def test_nothing_is_shipped_for_an_unknown_target(tmp_path: Path) -> None:
    assert read_shipped(TARGET.digest, tmp_path) == []
    assert shipped_targets(tmp_path / "absent") == []
    for wrong in ("", "..", "../" + TARGET.digest):
        with pytest.raises(InputError):
            read_shipped(wrong, tmp_path)


def test_a_file_with_another_targets_row_or_a_bad_one_is_not_used(tmp_path: Path) -> None:
    (path,) = write_shipped(rows(3), tmp_path)
    good = path.read_bytes()
    path.rename(tmp_path / f"{OTHER.digest}.rows.gz")
    with pytest.raises(InputError, match=OTHER.digest):
        read_shipped(OTHER.digest, tmp_path)
    data = gzip.decompress(good)
    for wrong in (data.replace(b'"ok"', b'"no"'), data.replace(b'"problem"', b'"question"'), data[:-30], b""):
        path.write_bytes(gzip.compress(wrong))
        with pytest.raises(InputError):
            read_shipped(TARGET.digest, tmp_path)
    for damaged in (good[:-20], good[:40] + b"\xff" + good[41:], b""):
        path.write_bytes(damaged)
        with pytest.raises(InputError):
            read_shipped(TARGET.digest, tmp_path)


def test_what_the_package_ships_can_be_read() -> None:
    assert shipped_folder().is_dir()
    for target in shipped_targets():
        assert read_shipped(target)


def test_rows_of_a_like_device_are_related(tmp_path, monkeypatch):
    """Another driver is another digest, but the same device: its times are a good guess. A GPU's are none for a CPU."""
    newer = replace(TARGET, versions=(("torch", "99"),))
    stranger = Target("cuda", "a GPU", "sm_90", 132, 1 << 34, 0)
    folder = tmp_path / "shipped"
    with Database.memory() as database:
        database.put([row(0, target=newer.digest), row(1, target=stranger.digest)], targets=[newer, stranger])
        database.export_shipped(folder)
    assert shipped_descriptions(folder) == {newer.digest: newer, stranger.digest: stranger}
    monkeypatch.setattr(shipped, "shipped_folder", lambda: folder)
    protocol = row(0).protocol
    with Database.memory(shipped=True) as database:
        assert database.lookup(row(0).problem, TARGET.digest, protocol) == []
        assert said(database.times(TARGET, (protocol,))) == said(TimeColumns.of([row(0)]))
        assert said(database.times(TARGET, ("another",))) == []
        database.put([row(2), failure(3)], targets=[TARGET])
        assert said(database.times(TARGET, (protocol,))) == said(TimeColumns.of([row(2), row(0)]))
        assert database.good_layers(TARGET.digest, protocol) == [row(2)]
        assert database.good_layers(newer.digest, protocol) == [row(0, target=newer.digest)]


def test_times_of_other_cpus_come_last_scaled_by_threads_and_registers(tmp_path, monkeypatch):
    wide = replace(TARGET, name="wide registers", arch="avx512", units=8)
    many = replace(TARGET, name="many threads", units=4)
    protocol = row(0).protocol
    rows = [
        row(0),
        row(0, target=many.digest),
        row(1, target=many.digest),
        row(1, target=wide.digest),
        row(2, target=wide.digest),
    ]
    with Database.memory() as database:
        database.put(rows, targets=[wide, TARGET, many])
        database.export_shipped(tmp_path)
    monkeypatch.setattr(shipped, "shipped_folder", lambda: tmp_path)
    wanted = [row(0), row(1, median_us=2 * row(1).median_us), row(2, median_us=8 * row(2).median_us)]
    with Database.memory(shipped=True) as database:
        assert said(database.times(TARGET, (protocol,))) == said(TimeColumns.of(wanted))
    with Database.memory() as database:
        database.put(rows, targets=[wide, TARGET, many])
        assert said(database.times(TARGET, (protocol,))) == said(TimeColumns.of(wanted))


def test_databases_of_a_process_parse_a_file_once_and_another_file_anew(tmp_path, monkeypatch):
    read, protocol = [], row(0).protocol
    decode = shipped_table.decode_rows
    monkeypatch.setattr(
        shipped_table, "decode_rows", lambda file, name, target: read.append(name) or decode(file, name, target)
    )
    monkeypatch.setattr(shipped, "shipped_folder", lambda: tmp_path)

    def found() -> list[Measurement]:
        with Database.memory(shipped=True) as database:
            database.lookup(row(0).problem, TARGET.digest, protocol).clear()  # of its own
            return database.lookup(row(0).problem, TARGET.digest, protocol)

    (path,) = write_shipped([row(0), row(1)], tmp_path)
    assert [found(), found()] == [[row(0)], [row(0)]]
    assert read == [path.name]
    assert shipped.open_shipped(TARGET.digest, tmp_path).rows() == [row(0), row(1)]
    assert len(read) == 1
    path.unlink()
    assert found() == []
    write_shipped([row(0, median_us=1.0)], tmp_path)
    assert found() == [row(0, median_us=1.0)]
    assert len(read) == 2
    path.write_bytes(b"damaged")
    for _ in range(2):
        with Database.memory(shipped=True) as database:
            assert database.lookup(row(0).problem, TARGET.digest, protocol) == []
            assert any(TARGET.digest in line for line in database.warnings)


@pytest.mark.parametrize("ships", [True, False])
def test_pieces_of_graphs_are_related_to_nothing(tmp_path, monkeypatch, ships):
    piece = SubgraphProblem("graph 1\ninput %a: fp32[1]\nreturn %a\n").key
    held = [row(0), row(1, problem=piece)]
    write_shipped(held if ships else [], tmp_path)
    monkeypatch.setattr(shipped, "shipped_folder", lambda: tmp_path)
    with Database.memory(shipped=True) as database:
        database.put([] if ships else held, targets=[TARGET])
        assert database.lookup(piece, TARGET.digest, row(0).protocol) == held[1:]
        assert said(database.times(TARGET, (row(0).protocol,))) == said(TimeColumns.of(held[:1]))
        assert database.good_layers(TARGET.digest, row(0).protocol) == held[:1]


def test_a_few_own_rows_do_not_hide_what_is_known_of_other_problems():
    gpu = Target("cuda", "one", "sm_90", 132, 1 << 34, 0)
    kin = replace(gpu, name="its kin")
    own, earlier = row(0, target=gpu.digest, protocol="v2"), row(0, target=gpu.digest, protocol="v1")
    other, far = row(1, target=gpu.digest, protocol="v1"), row(2, target=kin.digest, protocol="v2")
    hidden = row(1, target=kin.digest, protocol="v2", median_us=1.0)
    with Database.memory() as database:
        database.put([own, earlier, other, far, hidden], targets=[gpu, kin])
        assert said(database.times(gpu, ("v2", "v1"))) == said(TimeColumns.of([own, other, far]))


def test_a_damaged_description_is_no_description(tmp_path):
    write_shipped([row(0)], tmp_path, {TARGET.digest: TARGET})
    (path,) = tmp_path.glob("*.target.json")
    for text in (b"", b"{}", b"\xff", path.read_bytes().replace(b"cpu", b"cuda")):
        path.write_bytes(text)
        assert shipped_descriptions(tmp_path) == {}
