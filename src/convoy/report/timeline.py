"""The picture of a timeline: a row for each stream, a bar for each step, the critical path in its own colour."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Final

from convoy.report.drawing import WIDE, open_svg
from convoy.schedule.timeline import Span

ROW: Final = 30
LEFT: Final = 70
LEAST_WIDTH: Final = 0.4
"""Pixels that a bar has at least: shorter steps would not be seen."""


def timeline_chart(spans: Sequence[Span], width: int = WIDE) -> str:
    """Inline SVG of a measured timeline, `width` pixels wide; empty where there is none."""
    if not spans:
        return ""
    by_stream: dict[int, list[Span]] = {}
    for span in spans:
        by_stream.setdefault(span.stream, []).append(span)
    streams = sorted(by_stream)
    end = max(span.start_us + span.duration_us for span in spans) or 1.0
    scale = (width - LEFT - 10) / end
    height = 40 + ROW * len(streams)
    word = "stream" if len(streams) == 1 else "streams"
    label = f"Timeline: {len(spans)} steps on {len(streams)} {word}, {end / 1e3:.3f} ms"
    parts = [open_svg(width, height, label)]
    for row, stream in enumerate(streams):
        top = 10 + row * ROW
        parts.append(f'<text x="{LEFT - 8}" y="{top + 16}" text-anchor="end">stream {int(stream)}</text>')
        for span in by_stream[stream]:
            kind = "critical" if span.critical else "side"
            x, length = LEFT + span.start_us * scale, max(LEAST_WIDTH, span.duration_us * scale)
            words = escape(f"{span.name}: {span.engine}, {span.duration_us:.1f} us from {span.start_us:.1f} us")
            parts.append(
                f'<rect class="{kind}" x="{x:.2f}" y="{top}" width="{length:.2f}" height="{ROW - 8}">'
                f"<title>{words}</title></rect>"
            )
    parts += [
        f'<text class="small" x="{LEFT}" y="{height - 8}">0</text>',
        f'<text class="small" x="{width - 10}" y="{height - 8}" text-anchor="end">{end / 1e3:.3f} ms</text>',
        "</svg>",
    ]
    return "".join(parts)
