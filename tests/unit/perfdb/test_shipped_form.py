"""The form of shipped rows: what is read is what was written, and no damaged file is used or ends a session."""

from __future__ import annotations

import gzip
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from convoy.errors import InputError
from convoy.perfdb import Measurement
from convoy.perfdb.record import read_record, to_record
from convoy.perfdb.shipped import SUFFIX, read_shipped, shipped_folder, shipped_targets
from convoy.perfdb.shipped_form import PROBLEM_COLUMNS, ROW_COLUMNS, decode_rows, encode_rows
from convoy.perfdb.shipped_table import ShippedTable, read_table
from convoy.perfdb.time_columns import ProblemColumns
from convoy.problem import Conv3dProblem, ConvProblem, LinearProblem
from convoy.problem.layer_coordinates import facts_of_key
from tests.unit.perfdb.perfdb_rows import PROTOCOL, TARGET, failure, row, rows


def table(data: bytes) -> ShippedTable:
    return read_table(io.BytesIO(gzip.compress(data)), "file", TARGET.digest)


@pytest.fixture(scope="module")
def data() -> bytes:
    """The decompressed bytes of four rows."""
    return gzip.decompress(encode_rows([row(0), row(1), failure(2), row(3)], TARGET.digest))


def test_rows_come_back_as_they_were(data: bytes) -> None:
    assert table(data).rows() == [row(0), row(1), failure(2), row(3)]
    assert table(data).lookup(failure(2).problem, PROTOCOL) == (failure(2),)
    assert table(data).lookup(row(0).problem, "another") == ()
    assert table(gzip.decompress(encode_rows([], TARGET.digest))).rows() == []


def test_times_are_those_of_good_rows_that_are_not_known(data: bytes) -> None:
    times = table(data).times(PROTOCOL, {row(1).problem})
    assert times.measured_problems() == {row(0).problem, row(3).problem}
    assert times.configs.entries() == [str(row(0).config), str(row(3).config)]
    assert times.median_us.tolist() == [row(0).median_us, row(3).median_us]
    assert times.samples.tolist() == [10, 10]
    assert times.deterministic.tolist() == [True, False]
    assert len(table(data).times("another", ())) == 0


def test_every_row_that_ships_is_what_the_plain_check_gives() -> None:
    target = shipped_targets()[0]
    for found in read_shipped(target)[::97]:
        assert found == read_record(to_record(found))


@pytest.mark.parametrize("target", shipped_targets())
def test_the_facts_that_ship_are_those_of_the_keys(target: str) -> None:
    """They are stored to spare a start the parsing of keys: whoever changes what is derived writes the files anew."""
    with shipped_folder().joinpath(target + SUFFIX).open("rb") as file:
        problems = decode_rows(file, target, target).problems
    places = list(range(0, len(problems.keys), 41))
    said = ProblemColumns.of([problems.keys[place] for place in places])
    for name in ("kinds", "filters", "arithmetic", "epilogues"):
        assert getattr(problems, name).taken(places).entries() == getattr(said, name).entries()
    for name in ("described", "sizes", "pooled", "flops", "bytes_min"):
        assert np.array_equal(getattr(problems, name)[places], getattr(said, name))


def test_facts_are_those_of_the_problem() -> None:
    conv = ConvProblem(2, 16, 9, 9, 32, 3, 3, 1, 1, layout="nhwc", x_dtype="fp16", weight_dtype="fp16", y_dtype="fp16")
    facts = facts_of_key(conv.key)
    assert facts is not None
    assert (facts.kind, facts.flops, facts.bytes_min) == ("conv/fprop/dense/nhwc", conv.flops, conv.bytes_min)
    assert facts.coordinates.arithmetic == "half/as_torch"
    kinds = [facts_of_key(p.key).kind for p in (LinearProblem(1, 2, 3), Conv3dProblem(1, 4, (5, 6, 7), 4, (3, 3, 3)))]  # type: ignore[union-attr]
    assert kinds == ["linear/as_torch", "conv3d/fprop/dense/ncdhw"]
    assert facts_of_key("conv:9") is None
    assert facts_of_key(replace(conv, weight_mask="0123456789abcdef").key) is None


def changed(data: bytes, **fields: Any) -> bytes:
    """The bytes with other fields in the first line; `texts` are merged."""
    line, _, columns = data.partition(b"\n")
    said = json.loads(line)
    said["texts"] |= fields.pop("texts", {})
    return json.dumps({**said, **fields}).encode() + b"\n" + columns


def written(data: bytes, column: str, value: float) -> bytes:
    """The bytes with another first entry of a column."""
    line, _, columns = data.partition(b"\n")
    said = json.loads(line)
    place = 0
    for name, kind in (*ROW_COLUMNS.items(), *PROBLEM_COLUMNS.items()):
        if name == column:
            break
        count = said["rows"] if name in ROW_COLUMNS else len(said["texts"]["problem"]) * (3 if name == "size" else 1)
        place += count * np.dtype(kind).itemsize
    kind = {**ROW_COLUMNS, **PROBLEM_COLUMNS}[column]
    new = np.array([value]).astype(kind).tobytes()
    return line + b"\n" + columns[:place] + new + columns[place + len(new) :]


def test_a_file_that_is_no_table_is_refused(data: bytes) -> None:
    texts = json.loads(data.partition(b"\n")[0])["texts"]
    bad = [
        b"", b"\n", b"{}\n", b"[]\n", b"no json\n", data[:-1], data + b"\0", data[:300],
        changed(data, form=2), changed(data, form=None), changed(data, target="0" * 16), changed(data, rows=5),
        changed(data, rows=-1), changed(data, rows=True), changed(data, rows=10**9), changed(data, rows="4"),
        changed(data, texts={"status": "ok"}), changed(data, texts={"status": [1]}), changed(data, texts={"reason": []}),
        changed(data, texts={"problem": [texts["problem"][0]] * 4}), changed(data, texts={"kind": None}),
    ]  # fmt: skip
    for wrong in bad:
        with pytest.raises(InputError):
            table(wrong)


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("problem", 4),
        ("config", 2**32 - 1),
        ("kind", 9),
        ("median_us", np.inf),
        ("median_us", np.nan),
        ("median_us", -1.0),
        ("size", np.nan),
        ("flops", -1.0),
        ("deterministic", 2),
        ("described", 7),
    ],
)
def test_a_number_out_of_range_is_refused(data: bytes, column: str, value: float) -> None:
    with pytest.raises(InputError, match=column):
        table(written(data, column, value))


@pytest.mark.parametrize(
    ("column", "text"),
    [
        ("problem", "conv:9"),
        ("config", "aten"),
        ("config", "9lives@1[]"),
        ("config", "aten@1[b=1,a=2]"),
        ("config", "aten@99999999[]"),
        ("protocol", "a b"),
        ("status", "fine"),
        ("date", "yesterday"),
    ],
)
def test_a_row_that_no_session_wrote_is_refused_when_it_is_read(data: bytes, column: str, text: str) -> None:
    own = json.loads(data.partition(b"\n")[0])["texts"][column]
    found = table(changed(data, texts={column: [text, *own[1:]]}))
    for _ in range(2):  # a refusal is not remembered as a row
        with pytest.raises(InputError, match="row 0"):
            found.rows()
    assert len(found.times(PROTOCOL, ())) <= 3


def test_a_time_of_nothing_is_no_time(data: bytes) -> None:
    found = table(written(data, "median_us", 0.0))
    assert row(0).problem not in found.times(PROTOCOL, ()).measured_problems()
    with pytest.raises(InputError, match="median_us"):
        found.lookup(row(0).problem, PROTOCOL)


def test_rows_of_a_problem_in_two_places_are_refused(data: bytes) -> None:
    with pytest.raises(InputError, match="several places"):
        table(written(data, "problem", 3)).rows()


def test_a_flipped_bit_anywhere_is_found(tmp_path: Path) -> None:
    good = encode_rows(rows(5), TARGET.digest)
    path = tmp_path / (TARGET.digest + SUFFIX)
    for place in range(12, len(good), 53):
        path.write_bytes(good[:place] + bytes([good[place] ^ 16]) + good[place + 1 :])
        with pytest.raises(InputError):
            read_shipped(TARGET.digest, tmp_path)


def test_measurements_with_every_kind_of_text_come_back(tmp_path: Path) -> None:
    odd = [
        failure(0, reason='a "quote", a comma\r\n\x00 and ü — 漢\u2028'),
        row(1, median_us=5e-324, error=0.1 + 0.2, workspace_bytes=2**53, versions="", date=""),
    ]
    found: list[Measurement] = table(gzip.decompress(encode_rows(odd, TARGET.digest))).rows()
    assert found == odd
