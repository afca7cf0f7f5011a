"""Layer names in two lines, numbers beside dots, and what a page makes of names and sentences."""

from __future__ import annotations

import itertools
import math

import pytest

from convoy.report.dot_labels import DOT, HALF, lead, numbered, place
from convoy.report.drawing import ELLIPSIS, NARROW, WIDE, for_widths, legend, name_lines, open_svg, shortened
from convoy.report.html import breakable, prose


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("fc", ("fc",)),
        ("layer4.1.conv2+layer4.1.add+relu_1", ("layer4.1.conv2+", "layer4.1.add+relu_1")),  # behind a plus
        ("features.denseblock1.conv1", ("features.", "denseblock1.conv1")),  # without one behind a dot
        ("x" * 30, ("x" * 20, "x" * 10)),
    ],
)
def test_a_name_in_two_lines_is_whole(name: str, lines: tuple[str, ...]) -> None:
    assert name_lines(name, 20) == lines
    assert "".join(lines) == name


def test_a_name_that_is_longer_loses_its_middle() -> None:
    first, second = name_lines("layer1.conv1+layer1.conv2+layer1.conv3+layer1.relu_7", 20)
    assert first == "layer1.conv1+layer1."
    assert len(second) == 20
    assert second.startswith("conv2+lay")
    assert second.endswith("1.relu_7")
    assert ELLIPSIS in second
    assert shortened("abc", 3) == "abc"
    assert len(shortened("x" * 9, 4)) == 4


def test_a_chart_is_drawn_for_pages_and_for_phones() -> None:
    both = for_widths(lambda width: open_svg(width, 10, "a <title>") + "</svg>")
    assert f'class="wide" viewBox="0 0 {WIDE} 10"' in both
    assert f'class="narrow" viewBox="0 0 {NARROW} 10"' in both
    assert "<title>a &lt;title&gt;</title>" in both
    assert for_widths(lambda _: "") == ""
    assert legend([]) == ""
    assert legend([("dot", "a<b")]).count("<circle") == 1
    assert "a&lt;b" in legend([("after", "a<b")])


def test_dots_on_one_spot_share_a_number() -> None:
    assert numbered([(0.0, 0.0), (1.0, 0.0), (0.01, 0.02), (0.01, 0.04)]) == [[0, 2], [1], [3]]


def test_numbers_cover_neither_dots_nor_each_other() -> None:
    dots = [(100 + 9 * math.cos(angle), 100 + 9 * math.sin(angle)) for angle in range(12)]
    found = place({str(index): dot for index, dot in enumerate(dots)}, dots, (0, 0, 200, 200))
    for (x, y), (left, top) in itertools.combinations(found.values(), 2):
        assert abs(x - left) >= 8 or abs(y - top) >= 2 * HALF
    for (x, y), (left, top) in itertools.product(found.values(), dots):
        assert abs(x - left) >= 4 + DOT or abs(y - top) >= HALF + DOT
    assert all(0 < x < 200 and 0 < y < 200 for x, y in found.values())


def test_a_number_far_from_its_dot_has_a_line_to_it() -> None:
    assert lead((0, 0), (13, 0)) is None
    assert lead((0, 0), (60, 0)) == ((DOT, 0), (60 - HALF - 2, 0))


def test_names_may_break_and_backticks_are_code() -> None:
    assert breakable("a.b+<c>_1") == "a.<wbr>b+<wbr>&lt;c&gt;_<wbr>1"
    assert breakable("") == ""
    assert prose("use `--effort <none>` & go") == "use <code>--effort &lt;none&gt;</code> &amp; go"
    assert prose("a ` alone") == "a ` alone"
