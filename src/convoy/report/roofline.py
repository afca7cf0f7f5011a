"""The roofline of layers as inline SVG: operations a second over operations a byte, each long layer numbered."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from typing import Any, Final

from convoy.plan.describe import PREDICTED, time_text
from convoy.report.dot_labels import MIDDLE, lead, numbered, place
from convoy.report.drawing import WIDE, for_widths, legend, open_svg, text

TOP: Final = 30
BOTTOM: Final = 370
LEFT: Final = 62
RIGHT: Final = 20
"""Pixels right of the axes."""

HEIGHT: Final = 420

NUMBERED: Final = 24
"""Layers with a number, the longest: more numbers would cover each other on a phone."""

NAMED: Final = 3
"""Layers at one dot that its line in the list names."""


@dataclass(frozen=True, slots=True)
class Axis:
    """A logarithmic axis from `least` to `most` on `start` to `stop` pixels."""

    least: float
    most: float
    start: float
    stop: float

    def at(self, value: float) -> float:
        """Pixel of a value."""
        share = (math.log10(max(value, self.least)) - math.log10(self.least)) / (
            math.log10(self.most) - math.log10(self.least)
        )
        return self.start + share * (self.stop - self.start)

    def ticks(self) -> list[float]:
        """Powers of ten inside."""
        first, last = math.ceil(math.log10(self.least) - 1e-9), math.floor(math.log10(self.most) + 1e-9)
        return [10.0**power for power in range(first, last + 1)]


@dataclass(frozen=True, slots=True)
class Dot:
    """A layer in the chart.

    Attributes:
        intensity: operations per byte.
        speed: operations per second.
        predicted: whether its time is.
        name: the layer's.
        facts: its engine, time and speed, as text.
        time_us: its time.
    """

    intensity: float
    speed: float
    predicted: bool
    name: str
    facts: str
    time_us: float


def roofline_figure(layers: Sequence[Mapping[str, Any]], peaks: Mapping[str, float], dtype: str) -> str:
    """The chart for pages and phones with its legend, and the names of the numbered dots; empty where nothing can be drawn.

    Args:
        layers: with `name`, `engine`, `median_us`, `flops`, `bytes_min`, and `predicted` if the time may be.
        peaks: `bytes_per_s`, and FLOP/s as `flops_DTYPE`.
        dtype: whose ceiling is drawn.
    """
    drawn = for_widths(partial(roofline, layers, peaks, dtype))
    if not drawn:
        return ""
    dots = dots_of(layers)
    marks = [("dot", "measured time")] if not all(dot.predicted for dot in dots) else []
    marks += [("dot predicted", "predicted time (~)")] if any(dot.predicted for dot in dots) else []
    return legend(marks) + drawn + _key(dots)


def roofline(layers: Sequence[Mapping[str, Any]], peaks: Mapping[str, float], dtype: str, width: int = WIDE) -> str:
    """A dot for each layer and the device's measured ceilings, `width` pixels wide; the arguments are `roofline_figure`'s."""
    dots = dots_of(layers)
    rate, bandwidth = peaks.get("flops_" + dtype, peaks.get("flops_fp32", 0.0)), peaks.get("bytes_per_s", 0.0)
    if not dots or rate <= 0 or bandwidth <= 0:
        return ""
    widest = max(rate / bandwidth, *(dot.intensity for dot in dots)) * 1.5
    slowest, fastest = (choose(rate, *(dot.speed for dot in dots)) for choose in (min, max))
    x = Axis(0.1, 10 ** math.ceil(math.log10(widest)), LEFT, width - RIGHT)
    y = Axis(min(slowest, rate / 100) / 2, fastest * 3, BOTTOM, TOP)
    title = "Roofline: speed of each layer, and what a direct, dense algorithm can reach on this device"
    parts = [open_svg(width, HEIGHT, title), *_axes(x, y, width)]
    corners = [(0.1, 0.1 * bandwidth), (rate / bandwidth, rate), (x.most, rate)]
    path = " ".join(f"{x.at(i):.1f},{y.at(speed):.1f}" for i, speed in corners)
    parts.append(f'<polyline class="roof" points="{path}"/>')
    for dot in dots:
        kind = "point predicted" if dot.predicted else "point"
        at = f'cx="{x.at(dot.intensity):.1f}" cy="{y.at(dot.speed):.1f}"'
        parts.append(f'<circle class="{kind}" {at} r="5"><title>{escape(f"{dot.name}: {dot.facts}")}</title></circle>')
    at = [(x.at(dot.intensity), y.at(dot.speed)) for dot in dots]
    numbers = {str(number): at[own[0]] for number, own in enumerate(_groups(dots), 1)}
    for number, spot in place(numbers, at, (LEFT, TOP, width - RIGHT, BOTTOM)).items():
        if (ends := lead(numbers[number], spot)) is not None:
            (x1, y1), (x2, y2) = ends
            parts.append(f'<line class="lead" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>')
        parts.append(text(spot[0], spot[1] + MIDDLE, number, "number", "middle"))
    return "".join([*parts, "</svg>"])


def dots_of(layers: Sequence[Mapping[str, Any]]) -> list[Dot]:
    """The layers that can be drawn, the longest first."""
    found: list[Dot] = []
    for layer in layers:
        time_us = layer["median_us"]
        if layer["flops"] and layer["bytes_min"] and time_us:
            speed, predicted = layer["flops"] / time_us * 1e6, bool(layer.get("predicted"))
            rate = f"{PREDICTED if predicted else ''}{speed / 1e9:.1f} GFLOP/s"
            facts = f"{layer['engine']}, {time_text(time_us, predicted=predicted)} us, {rate}"
            found.append(Dot(layer["flops"] / layer["bytes_min"], speed, predicted, layer["name"], facts, time_us))
    return sorted(found, key=lambda dot: -dot.time_us)


def _groups(dots: Sequence[Dot]) -> list[list[int]]:
    """Indices of the numbered dots; those that lie on each other share a number."""
    return numbered([(math.log10(dot.intensity), math.log10(dot.speed)) for dot in dots[:NUMBERED]])


def _axes(x: Axis, y: Axis, width: int) -> list[str]:
    """Grid, ticks and the names of the axes."""
    parts: list[str] = []
    for tick in x.ticks():
        at = x.at(tick)
        parts.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{BOTTOM}"/>')
        parts.append(text(at, BOTTOM + 18, f"{tick:g}", "small", "middle"))
    for tick in y.ticks():
        at = y.at(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{width - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(text(LEFT - 6, at + 4, _engineering(tick), "small", "end"))
    parts.append(text((LEFT + width - RIGHT) / 2, HEIGHT - 8, "operations per byte", "small", "middle"))
    parts.append(text(4, 16, "operations per second; line: limit of direct algorithms", "small"))
    return parts


def _key(dots: Sequence[Dot]) -> str:
    """The layers of each number, as a list."""
    items: list[str] = []
    for own in _groups(dots):
        names = [f"<b>{escape(dots[index].name)}</b>: {escape(dots[index].facts)}" for index in own[:NAMED]]
        more = f"; and {len(own) - NAMED} more" if len(own) > NAMED else ""
        items.append(f"<li>{'; '.join(names)}{more}</li>")
    rest = len(dots) - NUMBERED
    left = f"<p>The {NUMBERED} longest of {len(dots)} layers have numbers.</p>" if rest > 0 else ""
    return f'<ol class="key">{"".join(items)}</ol>{left}'


def _engineering(value: float) -> str:
    for scale, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= scale:
            return f"{value / scale:g} {unit}"
    return f"{value:g}"
