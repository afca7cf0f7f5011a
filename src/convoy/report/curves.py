"""Line charts as inline SVG: one line a series, told apart by colour, dash and mark, with its name at its end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

from convoy.report.drawing import LINE, WIDE, for_widths, open_svg, shortened, text

HEIGHT: Final = 376
"""Pixels of a chart on a page; on a phone the names of the lines stand under it and take more."""

LEFT: Final = 60
RIGHT: Final = 180
"""Pixels for the names of the lines at their ends, on a page."""

TOP: Final = 54
BOTTOM: Final = 54
TITLE_LINE: Final = 44
"""Characters of a title's line on a phone."""

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


def curves_figure(
    title: str, x_label: str, y_label: str, series: Sequence[Series], *, log_x: bool = True, log_y: bool = True
) -> str:
    """The chart for pages and phones; the arguments are those of `curves_chart`."""

    def draw(width: int) -> str:
        return curves_chart(title, x_label, y_label, series, log_x=log_x, log_y=log_y, width=width)

    return for_widths(draw)


def curves_chart(
    title: str,
    x_label: str,
    y_label: str,
    series: Sequence[Series],
    *,
    log_x: bool = True,
    log_y: bool = True,
    width: int = WIDE,
) -> str:
    """A chart of some lines; empty where no line has a point.

    Args:
        title: also read by screen readers.
        x_label: of the horizontal axis.
        y_label: of the vertical axis, with its unit.
        series: the lines; one without points keeps its colour from the others.
        log_x: whether the x axis is logarithmic; its ticks are the values themselves.
        log_y: whether the y axis is; a linear one begins at 0.
        width: pixels; in a narrow chart the lines' names stand under it.
    """
    shown = {index: s for index, s in enumerate(series) if s.points}
    if not shown:
        return ""
    beside = width >= WIDE
    lines = wrap(title, TITLE_LINE) if not beside else [title]
    top = TOP + LINE * (len(lines) - 1)
    right, bottom = width - (RIGHT if beside else 8), top + HEIGHT - TOP - BOTTOM
    x, y, ticks = _scales(list(shown.values()), (LEFT + 8, right - 8), (bottom, top), (log_x, log_y))
    parts = [text(4, 18 + LINE * index, line) for index, line in enumerate(lines)]
    for tick in ticks:
        at = y.at(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(text(LEFT - 6, at + 4, short(tick), "small", "end"))
    xs = sorted({px for s in shown.values() for px, _ in s.points})
    parts += [text(at, bottom + 18, f"{v:g}", "small", "middle") for at, v in _spread([(x.at(v), v) for v in xs], 34)]
    parts.append(text((LEFT + right) / 2, bottom + 40, x_label, "small", "middle"))
    parts.append(text(4, top - 14, y_label, "small"))
    parts += [_line(s, index, x, y) for index, s in shown.items()]
    if beside:
        ends = sorted((y.at(s.points[-1][1]), index) for index, s in shown.items())
        for at, (_, index) in zip(spread_apart([at for at, _ in ends], bottom + BOTTOM - 10), ends, strict=True):
            parts += _name(right + 6, at, series[index].name, index, 22)
        height = HEIGHT
    else:
        parts += _names_below(list(shown), series, bottom + BOTTOM, width)
        height = bottom + BOTTOM + LINE * -(-len(shown) // 2) + 4
    return "".join([open_svg(width, height, title), *parts, "</svg>"])


def _scales(
    shown: Sequence[Series], across: tuple[float, float], up: tuple[float, float], logs: tuple[bool, bool]
) -> tuple[Scale, Scale, list[float]]:
    """Both axes, and the ticks of the vertical one; an axis with a value of 0 or less is linear."""
    xs = [x for s in shown for x, _ in s.points]
    ys = [y for s in shown for _, y in s.points]
    x = Scale(min(xs), max(xs), *across, logs[0] and min(xs) > 0)
    logarithmic = logs[1] and min(ys) > 0
    low, high = (min(ys) / 1.2, max(ys) * 1.2) if logarithmic else (0.0, max(max(ys) * 1.08, 1e-12))
    ticks = y_ticks(low, high, logarithmic)
    if len(ticks) < 2:  # values close to each other, with no round number between them
        ticks = sorted({min(ys), max(ys)})
    return x, Scale(low, high, *up, logarithmic), ticks


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


def spread_apart(places: Sequence[float], most: float) -> list[float]:
    """Rising places for lines of text, pushed apart so that none covers another, the last no further down than `most`."""
    found: list[float] = []
    for place in places:
        found.append(max(place, found[-1] + LINE) if found else place)
    for index in range(len(found) - 1, -1, -1):
        found[index] = min(found[index], most - LINE * (len(found) - 1 - index))
    return found


def _names_below(shown: Sequence[int], series: Sequence[Series], top: float, width: int) -> list[str]:
    """Names under a narrow chart, two in a line."""
    parts: list[str] = []
    for place, index in enumerate(shown):
        parts += _name(4 + place % 2 * width / 2, top + 8 + LINE * (place // 2), series[index].name, index, 21)
    return parts


def _name(x: float, y: float, name: str, index: int, columns: int) -> tuple[str, str]:
    """A line's colour and name, `y` in the middle."""
    colour = COLOURS[index % len(COLOURS)]
    square = f'<rect x="{x:g}" y="{y - 5:.1f}" width="9" height="9" rx="2" fill="{colour}"/>'
    return square, text(x + 14, y + 4, shortened(name, columns), "small")


def wrap(words: str, columns: int) -> list[str]:
    """Words in lines of at most `columns` characters; a longer word has a line of its own, shortened."""
    lines: list[str] = []
    for word in words.split():
        if lines and len(lines[-1]) + 1 + len(word) <= columns:
            lines[-1] += " " + word
        else:
            lines.append(shortened(word, columns))
    return lines


def y_ticks(low: float, high: float, logarithmic: bool) -> list[float]:
    """Values worth a line: 1, 2 and 5 times powers of ten, or powers alone where there are many; even steps on a linear axis."""
    if logarithmic:
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        steps = (1,) if len(powers) > 4 else (1, 2, 5)
        return [tick for p in powers for s in steps if low <= (tick := s * 10.0**p) <= high]
    step = 10.0 ** math.floor(math.log10(high))
    step = next(s for s in (step / 5, step / 2, step, 2 * step) if high / s <= 6)
    return [step * i for i in range(int(high / step) + 1)]


def _spread(marks: Sequence[tuple[float, float]], apart: float) -> list[tuple[float, float]]:
    """The first of the marks, and each that is at least `apart` pixels behind the one before."""
    kept: list[tuple[float, float]] = []
    for mark in marks:
        if not kept or mark[0] - kept[-1][0] >= apart:
            kept.append(mark)
    return kept


def short(value: float) -> str:
    """A number for an axis: 2k, 5M, 0.05."""
    for scale, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= scale:
            return f"{value / scale:.3g}{unit}"
    return f"{value:.3g}"
