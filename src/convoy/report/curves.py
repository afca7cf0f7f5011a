"""Line charts as inline SVG: one line a series, told apart by colour, dash and mark, with its name at its end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

WIDTH: Final = 880
HEIGHT: Final = 376
LEFT: Final = 78
RIGHT: Final = 180
TOP: Final = 54
BOTTOM: Final = 54

COLOURS: Final = ("#3b7dd8", "#d9580d", "#1b8a5f", "#8a5fc7", "#b8860b", "#c2408f", "#5b8a8a", "#7f8894", "#a0522d")
"""Middle tones, readable on white and on black; dash and mark tell the series apart in grey."""

DASHES: Final = ("", "7 4", "2 3", "9 3 2 3", "12 4", "4 4", "1 3", "6 2 1 2", "3 6")


@dataclass(frozen=True, slots=True)
class Series:
    """One line.

    Attributes:
        name: stands at its end and in the texts of its points.
        points: (x, y), by rising x.
        dashed: drawn thin and dashed without marks: a bound, or an ideal.
    """

    name: str
    points: tuple[tuple[float, float], ...]
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Scale:
    """Pixels of values, linear or logarithmic."""

    least: float
    most: float
    start: float
    stop: float
    log: bool

    def at(self, value: float) -> float:
        """Pixel of a value."""
        low, high, here = (self._inner(v) for v in (self.least, self.most, value))
        return self.start + (self.stop - self.start) * ((here - low) / (high - low) if high > low else 0.5)

    def _inner(self, value: float) -> float:
        return math.log10(max(value, 1e-300)) if self.log else value


def curves_chart(
    title: str, x_label: str, y_label: str, series: Sequence[Series], *, log_x: bool = True, log_y: bool = True
) -> str:
    """A chart of some lines; empty where no line has a point.

    Args:
        title: also read by screen readers.
        x_label: of the horizontal axis.
        y_label: of the vertical axis, with its unit.
        series: the lines; one without points keeps its colour from the others.
        log_x: whether the x axis is logarithmic; its ticks are the values themselves.
        log_y: whether the y axis is; a linear one begins at 0.
    """
    shown = {index: s for index, s in enumerate(series) if s.points}
    if not shown:
        return ""
    xs = sorted({x for s in shown.values() for x, _ in s.points})
    ys = [y for s in shown.values() for _, y in s.points]
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    x = Scale(xs[0], xs[-1], LEFT + 8, right - 8, log_x and xs[0] > 0)
    logarithmic = log_y and min(ys) > 0
    low, high = (min(ys) / 1.2, max(ys) * 1.2) if logarithmic else (0.0, max(max(ys) * 1.08, 1e-12))
    y = Scale(low, high, bottom, TOP, logarithmic)
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}"><title>{escape(title)}</title>',
        _text(LEFT, 18, title, ""),
    ]
    for tick in y_ticks(low, high, logarithmic):
        at = y.at(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(_text(LEFT - 6, at + 4, short(tick), "small", "end"))
    ticks = _spread([(x.at(v), v) for v in xs], 34)
    parts += [_text(at, bottom + 18, f"{value:g}", "small", "middle") for at, value in ticks]
    parts.append(_text((LEFT + right) / 2, HEIGHT - 14, x_label, "small", "middle"))
    parts.append(_text(LEFT, TOP - 10, y_label, "small"))
    parts += [_line(s, index, x, y) for index, s in shown.items()]
    ends = sorted((y.at(s.points[-1][1]), index) for index, s in shown.items())
    parts += _names(ends, series, right)
    return "".join([*parts, "</svg>"])


def _line(series: Series, index: int, x: Scale, y: Scale) -> str:
    colour = COLOURS[index % len(COLOURS)]
    points = [(x.at(px), y.at(py)) for px, py in series.points]
    dash = "3 4" if series.dashed else DASHES[index % len(DASHES)]
    stroke = f' stroke-dasharray="{dash}"' if dash else ""
    path = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
    width = 1.2 if series.dashed else 2
    line = f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"{stroke}/>'
    if series.dashed:
        return line
    marks = [
        f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3.4" fill="{colour}"><title>'
        f"{escape(series.name)}: {vy:.4g} at {vx:g}</title></circle>"
        for (px, py), (vx, vy) in zip(points, series.points, strict=True)
    ]
    return line + "".join(marks)


def _names(ends: Sequence[tuple[float, int]], series: Sequence[Series], right: float) -> list[str]:
    """Names at the lines' ends, pushed apart so that none covers another."""
    parts: list[str] = []
    last = -1e9
    for at, index in ends:
        last = max(at, last + 15)
        colour = COLOURS[index % len(COLOURS)]
        parts.append(f'<rect x="{right + 6}" y="{last - 5:.1f}" width="9" height="9" rx="2" fill="{colour}"/>')
        parts.append(_text(right + 20, last + 4, series[index].name[:24], "small"))
    return parts


def y_ticks(low: float, high: float, logarithmic: bool) -> list[float]:
    """Values worth a line: 1, 2 and 5 times powers of ten, or powers alone where there are many; even steps on a linear axis."""
    if logarithmic:
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        steps = (1,) if len(powers) > 4 else (1, 2, 5)
        return [tick for p in powers for s in steps if low <= (tick := s * 10.0**p) <= high]
    step = 10.0 ** math.floor(math.log10(high))
    step = next(s for s in (step / 5, step / 2, step, 2 * step) if high / s <= 6)
    return [step * i for i in range(int(high / step) + 1)]


def _spread(marks: Sequence[tuple[float, float]], room: float) -> list[tuple[float, float]]:
    """Those marks that leave each other room, from the first."""
    kept: list[tuple[float, float]] = []
    for mark in marks:
        if not kept or mark[0] - kept[-1][0] >= room:
            kept.append(mark)
    return kept


def short(value: float) -> str:
    """A number for an axis: 2k, 5M, 0.05."""
    for scale, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= scale:
            return f"{value / scale:g}{unit}"
    return f"{value:.3g}"


def _text(x: float, y: float, text: str, kind: str, anchor: str = "start") -> str:
    style = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{style}>{escape(text)}</text>'
