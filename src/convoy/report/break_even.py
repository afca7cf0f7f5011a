"""A plot for each layer: time over the share of zeros, as inline SVG. It shows from which share skipping zeros pays."""

from __future__ import annotations

from html import escape
from itertools import pairwise
from typing import Final

from convoy.report.drawing import WIDE, open_svg, shortened, text
from convoy.report.summary import LayerSummary, Summary

MOST: Final = 30
"""Layers drawn, the heaviest."""

_WIDTH, _HEIGHT = 280, 150
_LEFT, _TOP, _RIGHT, _BOTTOM = 44, 26, 266, 122


def break_even_chart(summary: Summary, width: int = WIDE) -> str:
    """A plot for each layer that an engine which skips zeros was measured on; empty where there is none.

    Args:
        summary: the result.
        width: pixels; so many plots stand side by side as fit.
    """
    layers = [layer for layer in summary.layers if len(layer.curve) > 1]
    layers = sorted(layers, key=lambda layer: -layer.median_us)[:MOST]
    if not layers:
        return ""
    columns = max(1, width // _WIDTH)
    title = "Time over the share of zeros in each layer's input"
    parts = [open_svg(width, -(-len(layers) // columns) * _HEIGHT, title)]
    for index, layer in enumerate(layers):
        x, y = index % columns * (width / columns), index // columns * _HEIGHT
        parts.append(f'<g transform="translate({x:g} {y})">{_plot(layer)}</g>')
    return "".join([*parts, "</svg>"])


def break_even(layer: LayerSummary) -> float | None:
    """The percentage from which the skipping engine is faster than the fastest other one, between measured shares.

    None where it never is, or where there is no other.
    """
    dense = _dense_us(layer)
    points = _points(layer)
    if dense is None or not points or points[-1][1] >= dense:
        return None
    found = points[0][0]
    for (zeros, time), (after, later) in pairwise(points):
        if time >= dense > later:
            found = zeros + (after - zeros) * (time - dense) / (time - later)
    return found


def _points(layer: LayerSummary) -> list[tuple[float, float]]:
    """(percent, microseconds) of the engine that is fastest at the most zeros."""
    if not layer.curve:
        return []
    most = max(point.zeros for point in layer.curve)
    engine = min((p for p in layer.curve if p.zeros == most), key=lambda p: p.median_us).engine
    return sorted((p.zeros, p.median_us) for p in layer.curve if p.engine == engine)


def _kind(layer: LayerSummary) -> str:
    """The kind of zeros that the engine of `_points` skips."""
    most = max(point.zeros for point in layer.curve)
    return min((p for p in layer.curve if p.zeros == most), key=lambda p: p.median_us).kind


def _dense_us(layer: LayerSummary) -> float | None:
    skipping = {point.engine for point in layer.curve}
    times = [c.median_us for c in layer.candidates if c.status == "ok" and c.engine not in skipping]
    return min(times, default=None)


def _plot(layer: LayerSummary) -> str:
    points, dense = _points(layer), _dense_us(layer)
    most = 1.1 * max(*(time for _, time in points), dense or 0.0)

    def at(zeros: float, time: float) -> tuple[float, float]:
        return _LEFT + (_RIGHT - _LEFT) * zeros / 100, _BOTTOM - (_BOTTOM - _TOP) * time / most

    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in points))
    pays = break_even(layer)
    kind = _kind(layer)
    says = "never faster" if pays is None else f"faster from {pays:.0f} % {kind.replace('_', ' ')} on"
    parts = [
        f"<title>{escape(layer.name)}: {says}</title>",
        text(_LEFT, 16, shortened(layer.name, 30)),
        f'<line class="grid" x1="{_LEFT}" x2="{_RIGHT}" y1="{_BOTTOM}" y2="{_BOTTOM}"/>',
        f'<polyline class="skipping" points="{line}"/>',
    ]
    parts += [f'<circle class="point" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in (at(*point) for point in points)]
    if dense is not None:
        _, level = at(0, dense)
        parts.append(f'<line class="level" x1="{_LEFT}" x2="{_RIGHT}" y1="{level:.1f}" y2="{level:.1f}"/>')
        parts.append(text(_LEFT - 4, level + 4, f"{dense:.0f}", "small", "end"))
    share = getattr(layer, kind)
    if share is not None:
        here, _ = at(100 * share, 0)
        parts.append(f'<line class="roof" x1="{here:.1f}" x2="{here:.1f}" y1="{_TOP}" y2="{_BOTTOM}"/>')
    for tick, anchor in ((0, "start"), (50, "middle"), (100, "end")):
        x, _ = at(tick, 0)
        unit = f"% {kind.replace('_', ' ')}" if tick == 50 else "%"
        parts.append(text(x, _BOTTOM + 16, f"{tick} {unit}", "small", anchor))
    return "".join(parts)
