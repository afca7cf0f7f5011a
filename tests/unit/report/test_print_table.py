"""Tables for the terminal: words stay whole, columns are left out where there is no room, COLUMNS counts in a pipe."""

from __future__ import annotations

import pytest

from convoy.report.tables import LONG_WORD, WIDTH, print_table

HEADS = ("layer", "engine", "layout", "us", "PyTorch us", "speed-up", "runner-up", "direct floor us")
ROWS = [
    ("layer1.0.conv1+layer1.0.relu", "cpu.direct [tile_h=4,tile_w=16]", "nhwc", "~123.4", "456.7", "3.70x", "onednn 130.2", ""),
    ("fc", "aten", "nchw", "12.0", "12.0", "1.00x", "", "80.1"),
]  # fmt: skip


def printed(capsys: pytest.CaptureFixture[str], *table: object) -> list[str]:
    print_table(*table)  # type: ignore[arg-type]
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("columns", [40, 60, 80, 100, 140, 200])
def test_a_table_fits_and_its_words_are_whole(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = printed(capsys, HEADS, ROWS, (3, 4, 5, 7), (7, 6, 2, 4))
    assert max(map(len, lines)) <= columns
    shown = {word for line in lines for word in line.split()}
    told = " ".join(lines).partition("left out")[2]
    for index, head in enumerate(HEADS):
        words = {word for row in (HEADS, *ROWS) for word in row[index].split() if len(word) <= LONG_WORD}
        assert words <= shown or head in told, head
    assert (not told) == (columns >= 100)


def test_the_least_columns_go_first(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    lines = printed(capsys, HEADS, ROWS, (3, 4, 5, 7), (7, 6, 2, 4))
    assert lines[1].split() == ["layer", "engine", "us", "speed-up"]
    assert lines[3].split()[0] == "layer1.0.conv1+"


def test_a_pipe_is_wide_unless_columns_says_more(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert max(map(len, printed(capsys, ("a",), [("word " * 100,)]))) == WIDTH
    monkeypatch.setenv("COLUMNS", "60")
    assert max(map(len, printed(capsys, ("a",), [("word " * 100,)]))) == 60


def test_the_first_column_stays_however_long_its_word_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    lines = printed(capsys, ("key", "b"), [("x" * 70, "y")])
    assert "".join(line.strip() for line in lines if "x" in line) == "x" * 70
    assert "left out, for 30 columns" in " ".join(line.strip() for line in lines)


def test_lines_of_a_cell_stay_lines(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, ("a", "b"), [("one\ntwo", "three")])
    assert [line.split() for line in lines if line.strip()][2:] == [["one", "three"], ["two"]]
