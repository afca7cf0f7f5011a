"""Tables of whole nets: a row for each net, a column for each provider; for inference, training and `convoy compare`."""

from __future__ import annotations

import math
from collections.abc import Sequence

from bench.inference.ablation_tables import STAGES
from bench.shared.rows import Row, gain_of, geometric_mean, settings


def latency_table(rows: Sequence[Row], title: str) -> str:
    """Nets down, providers across, and Convoy's gain over the best of the others."""
    cases = settings(rows)
    providers = list(
        dict.fromkeys(name for by_provider in cases.values() for name in by_provider if name not in STAGES)
    )
    providers.sort(key=lambda name: name == "convoy")
    commits = ", ".join(dict.fromkeys(row["commit"] for row in rows))
    versions = "; ".join(dict.fromkeys(row["versions"] for row in rows))
    lines = [f"{title}, {rows[0]['device']}, commit {commits}, {versions}; milliseconds, median", ""]
    lines.append("| net | dtype | batch | " + " | ".join(providers) + " | gain over the best other |")
    lines.append("|---|---|---|" + "---|" * (len(providers) + 1))
    gains: dict[str, list[float]] = {}
    for (subject, dtype, batch), by_provider in cases.items():
        gain = gain_of(by_provider)
        if gain is not None:
            gains.setdefault(f"{dtype}, batch {batch}", []).append(gain)
        cells = [_cell(by_provider.get(name)) for name in providers]
        cells.append("" if gain is None else f"{gain:.2f}x")
        lines.append(f"| {subject} | {dtype} | {batch} | " + " | ".join(cells) + " |")
    if gains:
        lines += ["", _means(gains)]
    return "\n".join(lines)


def _means(gains: dict[str, list[float]]) -> str:
    """The mean of all gains, and of each kind of case where there are several."""
    every = [gain for group in gains.values() for gain in group]
    line = f"Geometric mean of the gain over the best other provider, net by net: **{geometric_mean(every):.2f}x**."
    if len(gains) < 2:
        return line
    parts = [
        f"{name} {geometric_mean(group):.2f}x over {len(group)}, least {min(group):.2f}x"
        for name, group in gains.items()
    ]
    return f"{line} By kind: {'; '.join(parts)}."


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    if math.isnan(float(row["p50"])):
        return "failed"
    words = "" if row["ok"] == "true" else " (wrong)"
    return f"{float(row['p50']):.3f}{words}" + (" (noisy)" if row["note"].endswith("noisy") else "")
