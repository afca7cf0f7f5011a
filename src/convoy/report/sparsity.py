"""Sparsity: the shares of zeros in the inputs of a net's convolutions, as table, JSON and a page."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

from convoy.engines.activation_sparsity import SparsityShares
from convoy.report.drawing import LINE, WIDE, for_widths, name_lines, open_svg, text
from convoy.report.html import page

HEADINGS = ("layer", "x", "zeros %", "p10", "p90", "dead channels %", "dead tiles %", "dead blocks %")

_ROW, _LABEL = 34, 300


@dataclass(frozen=True, slots=True)
class LayerSparsity:
    """A convolution's input: shares in 0..1, means over images but for the percentiles.

    Attributes:
        name: the layer.
        x: its input's shape, one image.
        zeros: share of zeros.
        p10: that share's 10th percentile over images.
        p90: its 90th.
        dead_channels: share of channels that are zero all over an image.
        dead_tiles: share of tiles (8x8 pixels of one channel) that are zero.
        dead_blocks: share of blocks (8x8 pixels, 32 channels) that are zero.
    """

    name: str
    x: tuple[int, ...]
    zeros: float
    p10: float
    p90: float
    dead_channels: float
    dead_tiles: float
    dead_blocks: float

    @staticmethod
    def of(name: str, x: Sequence[int], images: Sequence[SparsityShares]) -> LayerSparsity:
        """Sum up the images, one at least."""
        shares = sorted(image.zeros for image in images)
        return LayerSparsity(
            name,
            tuple(x),
            math.fsum(shares) / len(shares),
            percentile(shares, 0.1),
            percentile(shares, 0.9),
            *(
                math.fsum(getattr(image, field) for image in images) / len(images)
                for field in ("dead_channels", "dead_tiles", "dead_blocks")
            ),
        )


@dataclass(frozen=True, slots=True)
class Sparsity:
    """Sparsity of a net: the model, the number of images, its layers in graph order, and notes."""

    model: str
    images: int
    layers: tuple[LayerSparsity, ...]
    notes: tuple[str, ...] = ()
    schema: int = 1

    def rows(self) -> list[tuple[str, ...]]:
        """The table's rows, in the order of `HEADINGS`."""
        return [
            (layer.name, "x".join(map(str, layer.x)), *(f"{100 * share:.1f}" for share in _shares(layer)))
            for layer in self.layers
        ]


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value below which a share of sorted values lies, interpolated between neighbours."""
    at = share * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])


def _shares(layer: LayerSparsity) -> tuple[float, ...]:
    return (layer.zeros, layer.p10, layer.p90, layer.dead_channels, layer.dead_tiles, layer.dead_blocks)


def write_sparsity_json(found: Sparsity, path: Path) -> None:
    """Write it as JSON, whole or not at all."""
    from convoy.plan.file import write_text

    write_text(path, json.dumps(dataclasses.asdict(found), indent=1) + "\n", "json")


def write_sparsity_html(found: Sparsity, path: Path) -> None:
    """Write it as a page of its own, whole or not at all."""
    from convoy.plan.file import write_text

    values: Mapping[str, Any] = {"found": found, "headings": HEADINGS, "chart": for_widths(partial(zeros_chart, found))}
    write_text(path, page("sparsity.html", values), "report")


def zeros_chart(found: Sparsity, width: int = WIDE) -> str:
    """A bar of the mean for each layer, a line from the 10th to the 90th percentile, and a bar of dead channels.

    In a chart of `width` pixels that is narrow the layers' names stand over the bars.
    """
    beside = width >= WIDE
    left = _LABEL if beside else 4
    most = width - left - 30
    row = _ROW if beside else _ROW + 2 * LINE
    height = 40 + len(found.layers) * row
    parts = [open_svg(width, height, "Share of zeros in the input of each convolution")]
    for tick in range(0, 101, 25):
        at = left + most * tick / 100
        parts.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="20" y2="{height - 10}"/>')
        parts.append(text(at, 14, f"{tick} %", "small", "start" if tick == 0 else "middle"))
    for index, layer in enumerate(found.layers):
        parts += _bars(layer, 26 + index * row, left, most)
    return "".join([*parts, "</svg>"])


def _bars(layer: LayerSparsity, top: float, left: float, most: float) -> list[str]:
    beside = left >= _LABEL
    lines = name_lines(layer.name, 36)
    first = top + 11 + (0 if len(lines) > 1 or not beside else LINE / 2)
    x, anchor = (left - 8, "end") if beside else (left, "start")
    parts = [text(x, first + LINE * index, line, anchor=anchor) for index, line in enumerate(lines)]
    top = top + 4 if beside else top + LINE * len(lines) + 4
    mean, low, high = (most * share for share in (layer.zeros, layer.p10, layer.p90))
    said = escape(f"{layer.name}: {layer.zeros:.1%} zeros, {layer.p10:.1%} to {layer.p90:.1%}")
    parts.append(
        f'<rect class="after" x="{left}" y="{top}" width="{mean:.1f}" height="12" rx="2"><title>{said}</title></rect>'
    )
    span = f'x1="{left + low:.1f}" x2="{left + high:.1f}" y1="{top + 6}" y2="{top + 6}"'
    parts.append(f'<line class="roof" {span}/>')
    said = escape(f"{layer.name}: {layer.dead_channels:.1%} dead channels")
    dead = most * layer.dead_channels
    parts.append(
        f'<rect class="before" x="{left}" y="{top + 14}" width="{dead:.1f}" height="6" rx="1"><title>{said}</title></rect>'
    )
    return parts
