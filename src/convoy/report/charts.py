"""The two pictures of the report as inline SVG: times before and after, and the roofline.

Drawn here and not by a plotting library, because a page under a policy without inline styles and with no foreign script may
hold neither the library's five megabytes nor the styles that it sets (docs/decisions/0002-charts.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from convoy.report.summary import Layer, Summary

WIDTH = 880
ROW = 22
LABEL = 300


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


def times_chart(summary: Summary) -> str:
    """Bars of the heaviest steps: PyTorch's time, and the time of what was chosen."""
    layers = sorted(summary.layers, key=lambda layer: -max(layer.median_us, layer.baseline_us))[:24]
    most = max((max(layer.median_us, layer.baseline_us) for layer in layers), default=1.0) or 1.0
    height = 30 + len(layers) * 2 * ROW
    parts = [_open(WIDTH, height, "Time of the heaviest steps, before and after")]
    for index, layer in enumerate(layers):
        top = 24 + index * 2 * ROW
        parts.append(_text(LABEL - 8, top + ROW - 2, layer.name[:42], anchor="end"))
        for offset, (kind, value) in enumerate((("before", layer.baseline_us), ("after", layer.median_us))):
            width = (WIDTH - LABEL - 90) * value / most
            y = top + offset * (ROW - 7)
            parts.append(f'<rect class="{kind}" x="{LABEL}" y="{y}" width="{width:.1f}" height="{ROW - 9}" rx="2"/>')
            if value:
                parts.append(_text(LABEL + width + 6, y + 10, f"{value:.1f} us", kind="small"))
    parts.append(_text(LABEL, 14, "PyTorch above, Convoy below", kind="small"))
    return "".join([*parts, "</svg>"])


def roofline_chart(summary: Summary) -> str:
    """Operations a second over operations a byte, under the device's measured ceilings."""
    layers = [layer for layer in summary.layers if layer.flops and layer.bytes_min and layer.median_us]
    rate = summary.peaks.get("flops_" + summary.dtype, summary.peaks.get("flops_fp32", 1e12))
    bandwidth = summary.peaks.get("bytes_per_s", 1e10)
    points = [(layer, layer.flops / layer.bytes_min, layer.flops / layer.median_us * 1e6) for layer in layers]
    x = Axis(0.1, _ceiling([p[1] for p in points] + [rate / bandwidth]), 70, WIDTH - 20)
    y = Axis(min([rate / 1e4, *(p[2] for p in points)]) / 2, rate * 3, 370, 20)
    parts = [_open(WIDTH, 420, "Roofline: speed of each layer under the device's ceilings")]
    parts += [_grid_x(x, tick, 20, 370) for tick in x.ticks()] + [
        _grid_y(y, tick, 70, WIDTH - 20) for tick in y.ticks()
    ]
    knee = rate / bandwidth
    start = (x.at(0.1), y.at(0.1 * bandwidth))
    parts.append(
        f'<polyline class="roof" points="{start[0]:.1f},{start[1]:.1f} {x.at(knee):.1f},{y.at(rate):.1f} '
        f'{WIDTH - 20},{y.at(rate):.1f}"/>'
    )
    parts += [_point(x.at(i), y.at(speed), layer, speed) for layer, i, speed in points]
    parts.append(_text(WIDTH / 2, 412, "operations a byte", kind="small", anchor="middle"))
    parts.append(_text(74, 14, "operations a second; the line is what this device was measured to reach", kind="small"))
    return "".join([*parts, "</svg>"])


def _ceiling(values: Sequence[float]) -> float:
    return 10 ** math.ceil(math.log10(max(values) * 1.5))


def _open(width: int, height: int, title: str) -> str:
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}"><title>{escape(title)}</title>'


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    style = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{style}>{escape(text)}</text>'


def _grid_x(axis: Axis, tick: float, top: float, bottom: float) -> str:
    at = axis.at(tick)
    line = f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{top}" y2="{bottom}"/>'
    return line + _text(at, bottom + 18, f"{tick:g}", kind="small", anchor="middle")


def _grid_y(axis: Axis, tick: float, left: float, right: float) -> str:
    at = axis.at(tick)
    line = f'<line class="grid" x1="{left}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}"/>'
    return line + _text(left - 6, at + 4, _engineering(tick), kind="small", anchor="end")


def _engineering(value: float) -> str:
    for scale, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= scale:
            return f"{value / scale:g} {unit}"
    return f"{value:g}"


def _point(x: float, y: float, layer: Layer, speed: float) -> str:
    label = f"{layer.name}: {layer.engine}, {layer.median_us:.1f} us, {speed / 1e9:.1f} GFLOP/s"
    return f'<circle class="point" cx="{x:.1f}" cy="{y:.1f}" r="5"><title>{escape(label)}</title></circle>'
