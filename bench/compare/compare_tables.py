"""Tables of frameworks side by side, and how long the comparison took."""

from __future__ import annotations

from collections.abc import Sequence

from bench.inference.latency_tables import latency_table
from bench.shared.rows import Row


def compare_table(rows: Sequence[Row], title: str) -> str:
    """Latencies, and what it took to find them."""
    return "\n\n".join(filter(None, (latency_table(rows, title), comparison_time(rows))))


def comparison_time(rows: Sequence[Row]) -> str:
    """What the comparison took, start-up, building and tuning included; empty where nobody looked at the clock."""
    taken = [row for row in rows if row["metric"] == "comparison_s"]
    if not taken:
        return ""
    parts = ", ".join(f"{row['subject']} {float(row['p50']):.0f} s" for row in taken)
    notes = "; ".join(dict.fromkeys(row["note"] for row in taken))
    return f"All of it took {sum(float(row['p50']) for row in taken):.0f} s: {parts} ({notes})."
