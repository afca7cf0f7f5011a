"""The times of a report's longest steps, before and after, as inline SVG.

Drawn here and not by a plotting library, because a page under a policy without inline styles and with no foreign script may
hold neither the library's five megabytes nor the styles that it sets (docs/notes/decisions/0002-charts.md).
"""

from __future__ import annotations

from functools import partial
from html import escape
from typing import Final

from convoy.plan.describe import time_text
from convoy.report.drawing import LINE, WIDE, for_widths, legend, name_lines, open_svg, text
from convoy.report.summary import LayerSummary, Summary

SHOWN: Final = 24
"""Steps in the chart, the longest."""

BAR: Final = 13
LABEL: Final = 300
"""Pixels for the names beside the bars; on a phone they stand over the bars."""

CHARACTERS: Final = 36
"""Of a line of a name, in that many pixels."""

TIME: Final = 96
"""Pixels for the time behind a bar."""


def times_figure(summary: Summary) -> str:
    """The chart for pages and phones, with its legend."""
    layers = longest(summary)
    marks = [("before", "PyTorch"), ("after", "Convoy")]
    if any(layer.predicted or layer.baseline_predicted for layer in layers):
        marks += [("predicted", "outlined: predicted, not measured (~)")]
    return legend(marks) + for_widths(partial(times_chart, summary))


def longest(summary: Summary) -> list[LayerSummary]:
    """The steps of the chart."""
    return sorted(summary.layers, key=lambda layer: -max(layer.median_us, layer.baseline_us))[:SHOWN]


def times_chart(summary: Summary, width: int = WIDE) -> str:
    """Bars of the longest steps: PyTorch's time, and under it the chosen engine's."""
    layers = longest(summary)
    most = max((max(layer.median_us, layer.baseline_us) for layer in layers), default=1.0) or 1.0
    parts: list[str] = []
    top = 6.0
    for layer in layers:
        drawn, top = _step(layer, top, most, width)
        parts += drawn
    return "".join([open_svg(width, top, "Times of the longest steps, PyTorch and Convoy"), *parts, "</svg>"])


def _step(layer: LayerSummary, top: float, most: float, width: int) -> tuple[list[str], float]:
    """The name and the bars of one step, and where the next begins."""
    beside = width >= WIDE
    lines = name_lines(layer.name, CHARACTERS)
    left = LABEL if beside else 2
    x, anchor = (LABEL - 8, "end") if beside else (2, "start")
    first = top + 12 + (LINE / 2 if beside and len(lines) == 1 else 0)
    parts = [f"<g><title>{escape(layer.name)}</title>"]
    parts += [text(x, first + LINE * index, line, anchor=anchor) for index, line in enumerate(lines)]
    bars = top if beside else top + LINE * len(lines) + 3
    for index, (kind, value, predicted) in enumerate(
        (("before", layer.baseline_us, layer.baseline_predicted), ("after", layer.median_us, layer.predicted))
    ):
        if value:
            y, length = bars + index * (BAR + 2), (width - left - TIME) * value / most
            style = f"{kind} predicted" if predicted else kind
            parts.append(
                f'<rect class="{style}" x="{left}" y="{y:g}" width="{length:.1f}" height="{BAR}" rx="2"/>'
                + text(left + length + 6, y + 11, f"{time_text(value, predicted=predicted)} us", "small")
            )
    return [*parts, "</g>"], bars + 2 * BAR + (16 if beside else 14)
