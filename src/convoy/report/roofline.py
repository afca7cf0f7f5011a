"""The roofline of layers as inline SVG: operations a second over operations a byte."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from convoy.plan.describe import PREDICTED, time_text
from convoy.report.charts import WIDTH

HEIGHT = 420


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


def roofline(layers: Sequence[Mapping[str, Any]], peaks: Mapping[str, float], dtype: str) -> str:
    """A point for each layer under the device's measured ceilings; empty where nothing can be drawn.

    Args:
        layers: with `name`, `engine`, `median_us`, `flops`, `bytes_min`, and `predicted` if the time may be.
        peaks: `bytes_per_s`, and FLOP/s as `flops_DTYPE`.
        dtype: whose ceiling is drawn.
    """
    known = [layer for layer in layers if layer["flops"] and layer["bytes_min"] and layer["median_us"]]
    rate, bandwidth = peaks.get("flops_" + dtype, peaks.get("flops_fp32", 0.0)), peaks.get("bytes_per_s", 0.0)
    if not known or rate <= 0 or bandwidth <= 0:
        return ""
    points = [
        (layer, layer["flops"] / layer["bytes_min"], layer["flops"] / layer["median_us"] * 1e6) for layer in known
    ]
    widest = max(rate / bandwidth, *(point[1] for point in points)) * 1.5
    x = Axis(0.1, 10 ** math.ceil(math.log10(widest)), 70, WIDTH - 20)
    fastest = max(rate, *(point[2] for point in points))
    y = Axis(min(rate / 1e4, *(point[2] for point in points)) / 2, fastest * 3, 370, 20)
    title = "Roofline: speed of each layer, and what a direct, dense algorithm can reach on this device"
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title}"><title>{title}</title>']
    for tick in x.ticks():
        at = x.at(tick)
        parts.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="20" y2="370"/>')
        parts.append(f'<text class="small" x="{at:.1f}" y="388" text-anchor="middle">{tick:g}</text>')
    for tick in y.ticks():
        at = y.at(tick)
        parts.append(f'<line class="grid" x1="70" x2="{WIDTH - 20}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text class="small" x="64" y="{at + 4:.1f}" text-anchor="end">{_engineering(tick)}</text>')
    corners = [(0.1, 0.1 * bandwidth), (rate / bandwidth, rate), (x.most, rate)]
    path = " ".join(f"{x.at(i):.1f},{y.at(speed):.1f}" for i, speed in corners)
    parts.append(f'<polyline class="roof" points="{path}"/>')
    for layer, intensity, speed in points:
        predicted = bool(layer.get("predicted"))
        time, mark = time_text(layer["median_us"], predicted=predicted), PREDICTED if predicted else ""
        said = f"{layer['name']}: {layer['engine']}, {time} us, {mark}{speed / 1e9:.1f} GFLOP/s"
        parts.append(
            f'<circle class="point" cx="{x.at(intensity):.1f}" cy="{y.at(speed):.1f}" r="5">'
            f"<title>{escape(said)}</title></circle>"
        )
    parts.append(f'<text class="small" x="{WIDTH / 2}" y="412" text-anchor="middle">operations a byte</text>')
    parts.append(
        '<text class="small" x="74" y="14">operations a second; the line is the limit of direct, dense algorithms</text>'
    )
    return "".join([*parts, "</svg>"])


def _engineering(value: float) -> str:
    for scale, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= scale:
            return f"{value / scale:g} {unit}"
    return f"{value:g}"
