"""Figures of curves: a panel for each group of curves, one colour and dash for each name."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from bench.shared.svg import MARGIN, WIDTH, page, text

LINES = ("#8c959f", "#3b7dd8", "#2f9e8f", "#e8590c", "#7a5fc7", "#c58a00", "#b04f9b", "#57606a")
DASHES = ("", "6 3", "2 3", "", "8 3 2 3", "", "4 2", "1 2")
PANEL_WIDTH = (WIDTH - 3 * MARGIN) / 2
PANEL_HEIGHT = 190.0

Points = list[tuple[float, float]]


def curves_page(
    title: str, about: str, panels_: dict[str, dict[str, Points]], names: Sequence[str], *, log_y: bool = True
) -> str:
    parts = [text(MARGIN, 28, title, "title")]
    x = float(MARGIN)
    for index, name in enumerate(names):
        shade, dash = LINES[index % len(LINES)], DASHES[index % len(DASHES)]
        parts.append(
            f'<line x1="{x:.1f}" x2="{x + 22:.1f}" y1="46" y2="46" stroke="{shade}" stroke-width="2"'
            + (f' stroke-dasharray="{dash}"' if dash else "")
            + "/>"
        )
        parts.append(text(x + 27, 50, name))
        x += 42 + 6.6 * len(name)
    for index, (words, curves) in enumerate(panels_.items()):
        left = MARGIN + index % 2 * (PANEL_WIDTH + MARGIN)
        parts.append(_curves(words, curves, names, left, 66 + index // 2 * PANEL_HEIGHT, log_y=log_y))
    rows_ = -(-len(panels_) // 2)
    return page(70 + rows_ * PANEL_HEIGHT, f"{title}: {about}", parts)


def _curves(
    words: str, curves: dict[str, Points], names: Sequence[str], left: float, top: float, *, log_y: bool
) -> str:
    start, right, upper, lower = left + 44, left + PANEL_WIDTH - 8, top + 26, top + PANEL_HEIGHT - 34
    xs = sorted({x for points in curves.values() for x, _ in points})
    ys = [y for points in curves.values() for _, y in points]
    low, high = (min(ys) / 1.15, max(ys) * 1.15) if log_y else (0.0, max(1.0, *ys) * 1.05)

    def at_x(value: float) -> float:
        share = math.log(value / xs[0]) / math.log(xs[-1] / xs[0]) if len(xs) > 1 and xs[0] > 0 else 0.5
        return start + share * (right - start)

    def at_y(value: float) -> float:
        share = math.log(value / low) / math.log(high / low) if log_y else (value - low) / (high - low)
        return lower - share * (lower - upper)

    ticks = [s * 10.0**p for p in range(-3, 7) for s in (1, 2, 5)] if log_y else [0.0, 0.25, 0.5, 0.75, 1.0]
    inside = [tick for tick in ticks if low <= tick <= high]
    inside = inside if len(inside) <= 6 else [tick for tick in inside if math.log10(tick).is_integer()]
    parts = [text(left, top + 14, words, "strong")]
    for tick in inside:
        y = at_y(tick)
        parts.append(f'<line class="grid" x1="{start:.1f}" x2="{right:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(text(start - 5, y + 4, f"{tick:g}" if log_y else f"{tick:.0%}", "small", "end"))
    parts += [text(at_x(x), lower + 16, f"{x:g}", "small", "middle") for x in xs]
    for name, points in curves.items():
        index = names.index(name)
        shade, dash = LINES[index % len(LINES)], DASHES[index % len(DASHES)]
        line = " ".join(f"{at_x(x):.1f},{at_y(y):.1f}" for x, y in sorted(points))
        style = f' stroke-dasharray="{dash}"' if dash else ""
        parts.append(f'<polyline points="{line}" fill="none" stroke="{shade}" stroke-width="1.8"{style}/>')
        parts += [
            f'<circle cx="{at_x(x):.1f}" cy="{at_y(y):.1f}" r="2.6" fill="{shade}">'
            f"<title>{escape(name)}: {y:.4g} at {x:g}</title></circle>"
            for x, y in sorted(points)
        ]
    return "\n".join(parts)
