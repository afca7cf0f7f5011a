"""The times of a report's heaviest steps, before and after, as inline SVG.

Drawn here and not by a plotting library, because a page under a policy without inline styles and with no foreign script may
hold neither the library's five megabytes nor the styles that it sets (docs/notes/decisions/0002-charts.md).
"""

from __future__ import annotations

from html import escape

from convoy.plan.describe import time_text
from convoy.report.summary import Summary

WIDTH = 880
ROW = 22
LABEL = 300


def times_chart(summary: Summary) -> str:
    """Bars of the slowest steps: PyTorch's time and the chosen engine's time."""
    layers = sorted(summary.layers, key=lambda layer: -max(layer.median_us, layer.baseline_us))[:24]
    most = max((max(layer.median_us, layer.baseline_us) for layer in layers), default=1.0) or 1.0
    height = 30 + len(layers) * 2 * ROW
    parts = [_open(WIDTH, height, "Time of the heaviest steps, before and after")]
    for index, layer in enumerate(layers):
        top = 24 + index * 2 * ROW
        parts.append(_text(LABEL - 8, top + ROW - 2, layer.name[:42], anchor="end"))
        bars = (
            ("before", layer.baseline_us, layer.baseline_predicted),
            ("after", layer.median_us, layer.predicted),
        )
        for offset, (kind, value, predicted) in enumerate(bars):
            width = (WIDTH - LABEL - 90) * value / most
            y = top + offset * (ROW - 7)
            parts.append(f'<rect class="{kind}" x="{LABEL}" y="{y}" width="{width:.1f}" height="{ROW - 9}" rx="2"/>')
            if value:
                parts.append(
                    _text(LABEL + width + 6, y + 10, time_text(value, predicted=predicted) + " us", kind="small")
                )
    parts.append(_text(LABEL, 14, "PyTorch above, Convoy below", kind="small"))
    return "".join([*parts, "</svg>"])


def _open(width: int, height: int, title: str) -> str:
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}"><title>{escape(title)}</title>'


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    style = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{style}>{escape(text)}</text>'
