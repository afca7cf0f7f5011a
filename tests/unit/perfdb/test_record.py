"""Records: columns are the fields, checks refuse what they must, seals see every change."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoy.errors import InputError
from convoy.perfdb import Measurement
from convoy.perfdb.record import (
    COLUMNS,
    DEFAULTS,
    KEY_COLUMNS,
    MAX_CHARACTERS,
    clip_reason,
    read_record,
    read_target,
    read_text,
    seal_pair,
    seal_row,
    target_json,
    to_record,
)
from convoy.problem import EngineConfig
from tests.unit.perfdb.perfdb_rows import POOL, TARGET, failure, row


def test_columns_are_the_fields_with_the_config_spread() -> None:
    fields = [f.name for f in dataclasses.fields(Measurement)]
    at = fields.index("config")
    config = [f.name for f in dataclasses.fields(EngineConfig)]
    assert list(COLUMNS) == fields[:at] + config + fields[at + 1 :]
    assert set(KEY_COLUMNS) < set(COLUMNS)
    assert {name for name, kind in COLUMNS.items() if kind is str} == set(MAX_CHARACTERS) | {"status"}


@pytest.mark.parametrize("one", [row(0), row(1), failure(2), row(3, problem=POOL.key), row(4, date="", versions="")])
def test_a_row_survives_the_way_there_and_back(one: Measurement) -> None:
    assert read_record(to_record(one)) == one
    assert read_record(json.loads(json.dumps(to_record(one)))) == one


def test_missing_columns_take_the_fields_defaults() -> None:
    record = {name: value for name, value in to_record(row(0)).items() if name not in DEFAULTS or name == "median_us"}
    assert read_record(record) == Measurement(
        row(0).problem, row(0).config, row(0).target, row(0).protocol, row(0).status, median_us=10.25
    )


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("problem", "conv:fprop:n1"),
        ("problem", "conv:" + "9" * 500),
        ("problem", row(0).problem.replace("n1c", "n01c")),
        ("problem", "subgraph:nhwc:12"),
        ("problem", "subgraph"),
        ("problem", ""),
        ("problem", "x\ud800"),
        ("engine", ""),
        ("engine", "a b"),
        ("engine", "'; DROP TABLE measurements; --"),
        ("engine", "e" * 101),
        ("version", -1),
        ("version", True),
        ("version", 10**9),
        ("version", "1"),
        ("knobs", "block_m"),
        ("knobs", "b=1,a=2"),
        ("knobs", "a=01"),
        ("knobs", "a=1,"),
        ("target", "0123"),
        ("target", "0123456789ABCDEF"),
        ("target", "../../etc/passwd"),
        ("protocol", ""),
        ("protocol", "two words"),
        ("status", "fine"),
        ("status", 1),
        ("samples", -1),
        ("samples", 1.5),
        ("samples", 2**70),
        ("median_us", 0.0),
        ("median_us", -1.0),
        ("median_us", float("nan")),
        ("median_us", float("inf")),
        ("median_us", 10**400),
        ("median_us", 1e13),
        ("spread_us", 1e13),
        ("error", -1e-9),
        ("workspace_bytes", 2**60),
        ("resident_bytes", -1),
        ("deterministic", 1),
        ("deterministic", "true"),
        ("reason", "r" * 4001),
        ("reason", None),
        ("date", "yesterday"),
        ("date", "2" * 41),
        ("colour", "blue"),
    ],
)
def test_a_bad_value_is_refused_by_its_column(column: str, value: object) -> None:
    with pytest.raises(InputError) as caught:
        read_record({**to_record(row(0)), column: value})
    assert caught.value.argument in (column, "column", "status")
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("column", ["samples", "median_us", "spread_us", "reason"])
def test_a_failure_has_no_times_and_a_reason(column: str) -> None:
    wrong = {"samples": 3, "median_us": 1.0, "spread_us": 0.5, "reason": ""}[column]
    with pytest.raises(InputError, match="compile_error"):
        read_record({**to_record(failure(0)), column: wrong})


@pytest.mark.parametrize("column", [name for name in COLUMNS if name not in DEFAULTS])
def test_a_missing_column_is_refused(column: str) -> None:
    with pytest.raises(InputError) as caught:
        read_record({name: value for name, value in to_record(row(0)).items() if name != column})
    assert caught.value.argument == column


@pytest.mark.parametrize("column", COLUMNS)
def test_the_seal_sees_a_change_of_any_column(column: str) -> None:
    record = to_record(row(1))
    value = record[column]
    other = (not value) if isinstance(value, bool) else value + 1 if isinstance(value, int | float) else value + "x"
    assert seal_row({**record, column: other}) != seal_row(record)


def test_the_seal_ignores_columns_at_their_default() -> None:
    """So that a column which a later version appends leaves the seals of older rows valid."""
    record = to_record(row(0, reason="", date=""))
    shorter = {name: value for name, value in record.items() if name not in ("reason", "date")}
    assert seal_row(shorter) == seal_row(record)


def test_the_seal_of_a_number_does_not_depend_on_how_it_is_stored() -> None:
    """SQLite keeps 3.0 as the integer 3 and True as 1."""
    record = to_record(row(0, median_us=3.0))
    assert seal_row({**record, "median_us": 3, "deterministic": 1}) == seal_row(record)


def test_seals_of_pairs_tell_tables_keys_and_texts_apart() -> None:
    seals = {
        seal_pair(*words)
        for words in (("texts", "a", "b"), ("targets", "a", "b"), ("texts", "b", "a"), ("texts", "ab", ""))
    }
    assert len(seals) == 4


@given(st.text(max_size=6000))
def test_any_reason_can_be_made_storable(reason: str) -> None:
    clipped = clip_reason(reason)
    assert len(clipped) <= MAX_CHARACTERS["reason"]
    assert clipped.encode().decode() == clipped
    if reason.isascii() and len(reason) <= MAX_CHARACTERS["reason"]:
        assert clipped == reason


def test_an_unpaired_surrogate_in_a_reason_is_replaced() -> None:
    assert clip_reason("tool said \udcff") == "tool said ?"


def test_a_subgraph_text_must_be_the_one_of_its_key() -> None:
    assert read_text(POOL.key, POOL.text) == (POOL.key, POOL.text)
    for key, text in (
        (POOL.key, POOL.text + " "),
        (row(0).problem, "x"),
        (POOL.key, ""),
        (POOL.key, "x" * (1 << 20) + "x"),
    ):
        with pytest.raises(InputError):
            read_text(key, text)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "null", "{}", '{"device": "cpu"}', "[" * 100_000, target_json(TARGET).replace("avx2", "avx512"),
     target_json(TARGET).replace('"units": 2', '"units": 1e999'), target_json(TARGET).replace('"units": 2', '"units": "x"')],
)  # fmt: skip
def test_a_target_must_have_its_digest(text: str) -> None:
    with pytest.raises(InputError):
        read_target(TARGET.digest, text)
    assert read_target(TARGET.digest, target_json(TARGET)) == TARGET
