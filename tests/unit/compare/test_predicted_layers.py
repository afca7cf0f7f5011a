"""Convoy's predicted layers on the page of a comparison: marked, and not called measured."""

from __future__ import annotations

import dataclasses

from convoy.compare.frameworks.convoy_program import layers_of
from convoy.compare.runs.run_page import sheet_of
from convoy.compare.runs.runfile import Run
from convoy.report.sheet import render_sheet
from tests.unit.compare.examples import compare_run
from tests.unit.report.example import summary


def marked(run: Run) -> Run:
    """The run with all of Convoy's layers predicted."""

    def change(layers: list[dict[str, object]]) -> list[dict[str, object]]:
        return [{**layer, "predicted": True} for layer in layers]

    rows = [
        dataclasses.replace(row, detail={**row.detail, "layers": change(row.detail["layers"])})
        if row.detail.get("layers")
        else row
        for row in run.rows
    ]
    return dataclasses.replace(run, rows=tuple(rows))


def test_sums_of_predicted_layers_are_marked() -> None:
    run = compare_run()
    assert any(row.detail.get("layers") and row.detail.get("kinds") for row in run.rows)
    plain, page = render_sheet(sheet_of([run])), render_sheet(sheet_of([marked(run)]))
    assert "conv ~" in page
    assert "~ marks sums with predicted times" in page
    assert "conv ~" not in plain
    assert "marks sums" not in plain


def test_a_run_file_says_which_layers_are_predicted() -> None:
    found = summary()
    first = dataclasses.replace(found.layers[0], predicted=True)
    layers = layers_of(dataclasses.replace(found, layers=(first, *found.layers[1:])))
    assert [layer["predicted"] for layer in layers] == [True, False, False]
