"""The page and the table of zeros, and the plots of when skipping them pays."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from convoy.engines.activation_sparsity import SparsityShares
from convoy.report.break_even import break_even, break_even_chart
from convoy.report.html import render
from convoy.report.sparsity import (
    HEADINGS,
    LayerSparsity,
    Sparsity,
    percentile,
    write_sparsity_html,
    write_sparsity_json,
    zeros_chart,
)
from convoy.report.summary import CandidateRow, CurvePoint, LayerSummary
from tests.unit.report.example import HOSTILE, summary

IMAGES = [SparsityShares(share, 0.1, 0.2, 0.0) for share in (0.5, 0.1, 0.3)]
FOUND = Sparsity(HOSTILE, 3, (LayerSparsity.of(HOSTILE, (3, 8, 8), IMAGES),), (HOSTILE,))


def test_images_are_summed_up() -> None:
    (layer,) = FOUND.layers
    assert layer.zeros == pytest.approx(0.3)
    assert (layer.p10, layer.p90) == pytest.approx((0.14, 0.46))
    assert FOUND.rows()[0][1:] == ("3x8x8", "30.0", "14.0", "46.0", "10.0", "20.0", "0.0")
    assert len(FOUND.rows()[0]) == len(HEADINGS)
    assert percentile([7.0], 0.9) == 7.0


def test_the_page_escapes_what_it_is_given_and_lets_in_no_other_script(tmp_path: Path) -> None:
    path = tmp_path / "zeros.html"
    write_sparsity_html(FOUND, path)
    text = path.read_text(encoding="utf-8")
    assert HOSTILE not in text
    assert len(re.findall("<script>", text)) == 1
    assert "default-src 'none'" in text.replace("&#39;", "'")
    assert ET.fromstring(zeros_chart(FOUND)).tag == "svg"


def test_the_json_holds_every_field(tmp_path: Path) -> None:
    write_sparsity_json(FOUND, tmp_path / "zeros.json")
    data = json.loads((tmp_path / "zeros.json").read_text(encoding="utf-8"))
    assert data.keys() == {f.name for f in dataclasses.fields(Sparsity)}
    assert data["layers"][0].keys() == {f.name for f in dataclasses.fields(LayerSparsity)}
    page = (Path(__file__).parents[3] / "docs" / "how-to" / "sparsity.md").read_text(encoding="utf-8")
    assert [f.name for f in dataclasses.fields(LayerSparsity) if f"`{f.name}`" not in page] == []


def layer(*times: float, dense: float = 100.0) -> LayerSummary:
    rows = (
        CandidateRow("onednn", "", "nhwc", "ok", dense, 1.0, 0, 0.0, ""),
        CandidateRow("skip", "zeros=50", "nhwc", "ok", 5.0, 1.0, 0, 0.0, ""),
        CandidateRow("broken", "", "nhwc", "timeout", 0.0, 0.0, 0, 0.0, "slow"),
    )
    curve = tuple(CurvePoint("skip", share, time) for share, time in zip((0, 50, 90), times, strict=False))
    plain = summary().layers[0]
    return dataclasses.replace(plain, candidates=rows, curve=curve, zeros=0.62)


def test_where_skipping_begins_to_pay() -> None:
    assert break_even(layer(120.0, 80.0, 20.0)) == pytest.approx(25)
    assert break_even(layer(90.0, 60.0, 20.0)) == 0
    assert break_even(layer(300.0, 200.0, 60.0)) == pytest.approx(50 + 40 * 100 / 140)
    assert break_even(layer(300.0, 200.0, 100.0)) is None
    assert break_even(layer()) is None


def test_plots_are_drawn_for_the_layers_that_have_a_curve_and_nobody_else() -> None:
    found = summary()
    assert break_even_chart(found) == ""
    assert "Time over zeros" not in render(found)
    drawn = dataclasses.replace(found, layers=(layer(120.0, 80.0, 20.0), *found.layers[1:]))
    chart = break_even_chart(drawn)
    assert len(ET.fromstring(chart).findall("g")) == 1
    assert "faster from 25 % zeros on" in chart
    page = render(drawn)
    assert "Time over zeros" in page
    of_channels = tuple(dataclasses.replace(point, kind="dead_channels") for point in drawn.layers[0].curve)
    live = dataclasses.replace(drawn.layers[0], curve=of_channels, dead_channels=0.5)
    other = break_even_chart(dataclasses.replace(drawn, layers=(live,)))
    assert "faster from 25 % dead channels on" in other
    assert other.count('class="roof"') == 1
    assert 'x1="155.0"' in other, "upright at the share of channels, not of values"
    assert HOSTILE not in page
