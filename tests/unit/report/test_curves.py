"""Charts of curves: where points and ticks stand, and that any name is only text."""

import itertools
import re
import xml.etree.ElementTree as ET

import pytest

from convoy.report.curves import COLOURS, DASHES, HEIGHT, Scale, Series, curves_chart, short, spread_apart, y_ticks
from convoy.report.drawing import LINE, NARROW, WIDE

LINES = [
    Series("gemm", ((16, 1.0), (32, 2.0), (64, 4.0), (128, 80.0))),
    Series("a <b> & 'c'", ((32, 3.0), (64, 3.0))),
    Series("ideal", ((16, 1.0), (128, 8.0)), dashed=True),
]


@pytest.mark.parametrize(("log_x", "log_y", "width"), [(True, True, WIDE), (False, False, NARROW)])
def test_it_is_one_well_formed_picture_with_all_points_inside(log_x: bool, log_y: bool, width: int) -> None:
    svg = curves_chart("Time <of> a layer", "channels", "us", LINES, log_x=log_x, log_y=log_y, width=width)
    root = ET.fromstring(svg)
    assert root.get("aria-label") == "Time <of> a layer"
    circles = list(root.iter("circle"))
    assert len(circles) == 6  # the dashed line has none
    for circle in circles:
        assert 0 < float(circle.get("cx", "")) < width
        assert 0 < float(circle.get("cy", "")) < HEIGHT
    assert "style" not in svg
    titles = [t.text for c in circles for t in c]
    assert "gemm: 80 at 128" in titles
    names = {t.text for t in root.iter("text")}
    assert {"gemm", "a <b> & 'c'", "ideal", "channels", "us"} <= names


def test_names_at_the_ends_do_not_cover_each_other() -> None:
    # The last lines end at the axis: their names must not stand under the picture.
    series = [Series(f"s{i}", ((1, 5.0), (2, 5.0 if i < 5 else 0.001 * i))) for i in range(9)]
    svg = curves_chart("t", "x", "y", series)
    heights = sorted(float(y) for y in re.findall(r'<rect x="\d+" y="([\d.]+)"', svg))
    assert len(heights) == 9
    assert min(b - a for a, b in itertools.pairwise(heights)) > LINE - 0.2
    assert heights[-1] < HEIGHT - LINE
    assert spread_apart([1.0, 2.0, 90.0], 50.0) == [1.0, 16.0, 50.0]
    assert spread_apart([48.0, 49.0, 50.0], 50.0) == [20.0, 35.0, 50.0]


def test_an_axis_over_almost_equal_values_has_ticks() -> None:
    svg = curves_chart("t", "x", "y", [Series("s", ((1, 1234.0), (2, 1234.0)))])
    assert ">1.23k<" in svg


def test_nothing_to_draw_is_no_picture() -> None:
    assert curves_chart("t", "x", "y", []) == ""
    assert curves_chart("t", "x", "y", [Series("none", ())]) == ""
    assert "circle" in curves_chart("t", "x", "y", [Series("one", ((3, 0.0),))])


def test_scales_and_ticks() -> None:
    scale = Scale(1, 100, 0, 200, True)
    assert [scale.at(v) for v in (1, 10, 100)] == [0, 100, 200]
    assert Scale(0, 10, 100, 0, False).at(2.5) == 75
    assert y_ticks(0.8, 30, True) == [1, 2, 5, 10, 20]
    assert y_ticks(0.5, 2e6, True) == [10.0**p for p in range(7)]
    assert y_ticks(0, 1.05, False) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert [short(v) for v in (0.25, 12, 2000, 3.5e6, 2e9)] == ["0.25", "12", "2k", "3.5M", "2G"]


def test_lines_are_told_apart_without_colour() -> None:
    assert len(set(DASHES)) == len(DASHES) >= len(COLOURS) == len(set(COLOURS))
