"""Predicted times in tables, on the page and in the JSON: marked, without speed-ups, and never called measured."""

from __future__ import annotations

import dataclasses
import html
import json
import re

import pytest

from convoy.report.html import render
from convoy.report.summary import Strategy, Summary
from convoy.report.tables import (
    FLOOR_NOTE,
    PREDICTED_NOTE,
    SLOWER_NOTE,
    headlines,
    print_summary,
    speedup,
    table_notes,
)
from tests.unit.report.example import summary


def predicted(found: Summary, **fields: bool) -> Summary:
    layers = tuple(
        dataclasses.replace(
            layer, **fields, candidates=tuple(dataclasses.replace(c, predicted=True) for c in layer.candidates)
        )
        for layer in found.layers
    )
    strategies = tuple(dataclasses.replace(s, predicted=True) for s in found.selection.strategies)
    selection = dataclasses.replace(found.selection, predicted=True, strategies=strategies)
    return dataclasses.replace(found, layers=layers, selection=selection)


BOTH = predicted(summary(), predicted=True, baseline_predicted=True)


def test_every_predicted_cell_of_the_table_is_marked(capsys: pytest.CaptureFixture[str]) -> None:
    print_summary(BOTH, {})
    out = capsys.readouterr().out
    for text in ("~30.0", "~60.0", "aten ~20.0", "~0.060 ms", "~0.120 ms"):
        assert text in out
    layers = [line for line in out.splitlines() if "conv1" in line]
    assert layers
    assert not re.search(r"\d\.\d\dx", layers[0])


@pytest.mark.parametrize("field", ["predicted", "baseline_predicted"])
def test_a_speed_up_with_one_predicted_time_is_left_out(field: str) -> None:
    found = predicted(summary(), **{field: True})
    assert [speedup(layer) for layer in found.layers] == ["", "", ""]
    assert "2.00x" in speedup(summary().layers[0])


def test_the_page_marks_them_too() -> None:
    page = render(BOTH)
    assert ">~30.0<" in page
    assert ">~60.0<" in page
    assert "~10.00" in page  # a candidate
    assert "aten ~20.0" in page
    assert "~30.0 us" in page  # chart and roofline
    assert "~0.060 ms" in page
    assert PREDICTED_NOTE in page
    clean = render(summary())
    assert "~" not in clean.partition("<main>")[2].partition("<script>")[0]
    assert PREDICTED_NOTE not in clean


def test_no_bound_is_told_on_predicted_times() -> None:
    assert "can be under" not in " ".join(headlines(BOTH))
    assert "can be under" not in render(BOTH)
    assert "can be under 0.060 ms" in " ".join(headlines(summary()))


def test_the_json_says_which_times_are_predicted() -> None:
    data = BOTH.to_dict()
    assert data["layers"][0]["predicted"]
    assert data["layers"][0]["baseline_predicted"]
    assert data["layers"][0]["candidates"][0]["predicted"]
    assert data["selection"]["predicted"]
    assert data["selection"]["strategies"][0] == dataclasses.asdict(Strategy("exact", 60.0, predicted=True))
    assert not summary().to_dict()["selection"]["predicted"]


def test_the_json_has_every_field() -> None:
    for each in (BOTH, summary()):
        assert json.dumps(each.to_dict()) == json.dumps(dataclasses.asdict(each))


def test_one_line_says_what_the_floor_is_and_why_a_slower_step_may_be_right() -> None:
    assert table_notes(summary()) == [FLOOR_NOTE, SLOWER_NOTE]  # the runner-up takes 20 us, the first layer 30
    quick = tuple(dataclasses.replace(layer, median_us=9.0) for layer in summary().layers)
    assert table_notes(dataclasses.replace(summary(), layers=quick)) == [FLOOR_NOTE]
    bare = tuple(dataclasses.replace(layer, floor_us=None, baseline_us=0.0, candidates=()) for layer in quick)
    assert table_notes(dataclasses.replace(summary(), layers=bare)) == []
    slow = tuple(dataclasses.replace(layer, baseline_us=2.0, candidates=()) for layer in quick)
    assert SLOWER_NOTE in table_notes(dataclasses.replace(summary(), layers=slow))  # 0.22x
    assert FLOOR_NOTE in html.unescape(render(summary()))
    assert "direct floor us" in render(summary())
