"""Options of PyTorch, as bars from the defaults to the best setting."""

from __future__ import annotations

from collections.abc import Sequence

from bench.shared.rows import Row
from bench.shared.svg import MARGIN, PEERS, WIDTH, headline, page, short, source, text

OPTIONS_DRAWN = ("torch.defaults", "torch.step", "torch.best", "torch.loader")
"""Bars of an ablation; the last beside the best setting, in a subject of their own."""


def options_figure(rows: Sequence[Row], title: str) -> str:
    """Bars from the defaults, option by option, to the best setting, for each net and batch."""
    cases: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row["metric"] == "latency_ms" and row["provider"] in OPTIONS_DRAWN:
            cases.setdefault((row["subject"], row["batch"]), []).append(row)
    parts = [headline(title, rows)]
    parts.append(
        text(MARGIN, 46, "From the defaults, option by option, to the best setting: milliseconds, median.", "small")
    )
    y = 62.0
    for (subject, batch), own in cases.items():
        most = max(float(row["p80"]) for row in own)
        parts.append(text(MARGIN, y + 14, f"{subject}, batch {batch}", "strong"))
        y += 22
        for row in own:
            name = row["note"].split("; ")[0].removesuffix(", kept")  # as all that are drawn are
            start, room = MARGIN + 225.0, WIDTH - 2 * MARGIN - 225 - 90
            low, middle, high = (start + room * float(row[q]) / most for q in ("p20", "p50", "p80"))
            shade = PEERS[row["provider"]]
            parts.append(text(start - 8, y + 10, name, anchor="end"))
            parts.append(
                f'<rect x="{start:.1f}" y="{y:.1f}" width="{middle - start:.1f}" height="12" rx="1.5" fill="{shade}"/>'
            )
            parts.append(f'<line class="spread" x1="{low:.1f}" x2="{high:.1f}" y1="{y + 6:.1f}" y2="{y + 6:.1f}"/>')
            parts.append(text(max(high, middle) + 5, y + 10, f"{short(float(row['p50']))} ms", "small"))
            y += 16
        y += 10
    return page(y + MARGIN, f"{title}, {source(rows)}: from the defaults to the best setting", parts)
