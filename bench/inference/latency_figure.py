"""Whole nets, provider by provider, as bars."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from bench.inference.ablation_tables import STAGES
from bench.shared.rows import Row, gain_of, geometric_mean, settings
from bench.shared.svg import MARGIN, WIDTH, colour, headline, page, short, source, text


@dataclass(frozen=True)
class Panel:
    """Nets of one dtype and batch: their rows by provider, in the order of the file."""

    title: str
    nets: dict[str, dict[str, Row]]

    @property
    def height(self) -> float:
        """Pixels that it takes."""
        return 34 + sum(len(by_provider) * 12 + 10 for by_provider in self.nets.values())


def panels(rows: Sequence[Row]) -> list[Panel]:
    """A panel for each dtype, numerics and batch."""
    found: dict[tuple[str, int], dict[str, dict[str, Row]]] = {}
    for (subject, dtype, batch), by_provider in settings(rows).items():
        timed = [item for item in by_provider.items() if not math.isnan(float(item[1]["p50"]))]
        shown = [item for item in timed if item[0] not in STAGES]  # which have a table of their own
        ordered = dict(sorted(shown, key=lambda item: item[0] == "convoy"))
        found.setdefault((dtype, int(batch)), {})[subject] = ordered
    return [Panel(_panel_title(*key, nets), nets) for key, nets in sorted(found.items())]


def _panel_title(dtype: str, batch: int, nets: dict[str, dict[str, Row]]) -> str:
    gains = [gain for by_provider in nets.values() if (gain := gain_of(by_provider)) is not None]
    mean = f": Convoy {geometric_mean(gains):.2f}x the best other" if gains else ""
    return f"{dtype}, batch {batch}{mean}"


def latency_figure(rows: Sequence[Row], title: str) -> str:
    """Bars of every provider, net by net, as long as their share of the net's slowest; the label says milliseconds."""
    every = panels(rows)
    columns = 1 if len(every) == 1 else 2
    width = (WIDTH - MARGIN * (columns + 1)) / columns
    drawn = dict.fromkeys(name for panel in every for by_provider in panel.nets.values() for name in by_provider)
    providers = sorted(drawn, key=lambda name: name == "convoy")
    parts = [headline(title, rows)]
    parts.append(
        text(MARGIN, 46, "Latency, median; the shorter the better. Bars are drawn to each net's slowest.", "small")
    )
    parts.append(_legend(providers, 66))
    tops = [84.0] * columns
    for panel in every:
        column = tops.index(min(tops))
        parts.append(_bars(panel, MARGIN + column * (width + MARGIN), tops[column], width))
        tops[column] += panel.height + MARGIN
    return page(max(tops), f"{title}, {source(rows)}: latency of each provider, net by net", parts)


def _legend(providers: Sequence[str], y: float) -> str:
    parts: list[str] = []
    x = float(MARGIN)
    for name in providers:
        parts.append(f'<rect x="{x:.1f}" y="{y - 9:.1f}" width="10" height="10" rx="2" fill="{colour(name)}"/>')
        parts.append(text(x + 15, y, name))
        x += 30 + 6.6 * len(name)
    return "".join(parts)


def _bars(panel: Panel, left: float, top: float, width: float) -> str:
    parts = [text(left, top + 16, panel.title, "strong")]
    start, room = left + 104, width - 104 - 74
    y = top + 30
    for net, by_provider in panel.nets.items():
        most = max(float(row["p80"]) for row in by_provider.values())
        parts.append(text(start - 8, y + len(by_provider) * 6 + 4, net, anchor="end"))
        for name, row in by_provider.items():
            low, middle, high = (start + room * float(row[q]) / most for q in ("p20", "p50", "p80"))
            right = row["ok"] == "true"
            fill = f'fill="{colour(name)}"' if right else f'fill="none" stroke="{colour(name)}" stroke-dasharray="3 2"'
            parts.append(
                f'<rect x="{start:.1f}" y="{y:.1f}" width="{middle - start:.1f}" height="10" rx="1.5" {fill}>'
                f"<title>{escape(name)}</title></rect>"
            )
            parts.append(f'<line class="spread" x1="{low:.1f}" x2="{high:.1f}" y1="{y + 5:.1f}" y2="{y + 5:.1f}"/>')
            label = f"{short(float(row['p50']))} ms" + ("" if right else ", wrong")
            kind = "small strong" if name == "convoy" else "small"
            parts.append(text(max(high, middle) + 5, y + 9, label, kind))
            y += 12
        y += 10
    return "\n".join(parts)
