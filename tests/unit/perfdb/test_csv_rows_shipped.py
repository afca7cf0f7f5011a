"""Rows of shipped tables: the way that looks texts up gives what the plain check gives, and refuses what it refuses."""

from __future__ import annotations

import pytest

from convoy.errors import InputError
from convoy.perfdb.csv_rows import CsvTable, cells_record, read_table
from convoy.perfdb.record import read_record
from convoy.perfdb.shipped import SUFFIX, shipped_folder, shipped_targets


@pytest.fixture(scope="module")
def table() -> CsvTable:
    entry = shipped_folder().joinpath(shipped_targets()[0] + SUFFIX)
    with entry.open("rb") as file:
        return read_table(file, entry.name)


def test_each_row_is_that_of_the_plain_check(table: CsvTable) -> None:
    for index in range(0, len(table.lines), 97):
        assert table.checked(table.lines[index]) == read_record(cells_record(table.header, table.lines[index][1]))


@pytest.mark.parametrize(
    ("column", "cell"),
    [
        ("problem", "conv:9"),
        ("engine", "9lives"),
        ("knobs", "b=1,a=2"),
        ("version", "-1"),
        ("version", "1.5"),
        ("target", "none"),
        ("protocol", "a b"),
        ("status", "fine"),
        ("median_us", "inf"),
        ("median_us", "0"),
        ("deterministic", "maybe"),
        ("date", "yesterday"),
    ],
)
def test_a_damaged_cell_is_refused_in_the_same_words(table: CsvTable, column: str, cell: str) -> None:
    if column not in table.header:
        pytest.skip(f"the table has no column {column}")
    cells = list(table.lines[0][1])
    cells[table.header.index(column)] = cell
    damaged = CsvTable(table.name, table.header, [(2, cells)])
    with pytest.raises(InputError) as plain:
        read_record(cells_record(table.header, cells))
    for _ in range(2):  # a refusal is not remembered as a value
        with pytest.raises(InputError, match="line 2") as caught:
            damaged.checked(damaged.lines[0])
        assert str(plain.value) in str(caught.value)
