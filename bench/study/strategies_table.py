"""The table of strategies for whole nets, from the rows of `convoy study --strategies`."""

from __future__ import annotations

from collections.abc import Sequence

from bench.shared.rows import Row

STRATEGIES = {
    "convoy.library": "library",
    "convoy.one_algorithm": "one algorithm",
    "convoy.per_layer": "per layer",
    "convoy.exact": "exact",
}
"""Strategies for whole nets by provider, in words."""


def strategies_table(rows: Sequence[Row], title: str) -> str:
    """Sums of measured times of each strategy, how many times those of exact selection, and memory; empty without any."""
    found: dict[tuple[str, ...], dict[tuple[str, str], float]] = {}
    rows = [row for row in rows if row["provider"] in STRATEGIES]
    if not rows:
        return ""
    for row in rows:
        if row["metric"] in ("total_us", "peak_memory_bytes"):
            key = (row["subject"], row["dtype"], row["batch"], row["protocol"])
            found.setdefault(key, {})[row["provider"], row["metric"]] = float(row["p50"])
    commits = ", ".join(dict.fromkeys(row["commit"] for row in rows))
    lines = [
        f"{title}, {rows[0]['device']}, commit {commits}; milliseconds, and times exact",
        "",
        "| net | dtype | batch | "
        + " | ".join(STRATEGIES.values())
        + " | memory, MB: library | per layer | exact | from |",
        "|---|---|---|" + "---|" * (len(STRATEGIES) + 4),
    ]
    for (net, dtype, batch, protocol), figures in found.items():
        best = figures["convoy.exact", "total_us"]
        cells = [_strategy(figures.get((name, "total_us")), best) for name in STRATEGIES]
        memory = [
            f"{figures[name, 'peak_memory_bytes'] / 1e6:.1f}" if (name, "peak_memory_bytes") in figures else ""
            for name in ("convoy.library", "convoy.per_layer", "convoy.exact")
        ]
        lines.append(f"| {net} | {dtype} | {batch} | " + " | ".join([*cells, *memory, protocol]) + " |")
    return "\n".join(lines)


def _strategy(total_us: float | None, best_us: float) -> str:
    return "" if total_us is None else f"{total_us / 1e3:.3f} ({total_us / best_us:.2f}x)"
