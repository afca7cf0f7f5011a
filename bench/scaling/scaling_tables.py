"""The table of training on several GPUs."""

from __future__ import annotations

from collections.abc import Sequence

from bench.shared.rows import Row

SCALING = {
    "images_per_s": "images/s",
    "efficiency": "efficiency",
    "step_ms": "step ms",
    "compute_ms": "computation",
    "group_ms": "cost of the process group",
    "exposed_ms": "exposed communication",
    "bound_ms": "bound of communication",
}
"""Metrics of scaling that are shown, and their heads."""


def scaling_table(rows: Sequence[Row], title: str) -> str:
    """Throughput, efficiency and where a step's time goes, by net, number of GPUs and provider."""
    found: dict[tuple[str, ...], dict[str, float]] = {}
    failed: list[str] = []
    for row in rows:
        if row["ok"] != "true":
            failed.append(f"{row['subject']}, batch {row['batch']}, {row['provider']}: {row['note']}")
            continue
        key = (row["subject"], row["dtype"], row["batch"], row["provider"])
        found.setdefault(key, {})[row["metric"]] = float(row["p50"])
    commits = ", ".join(dict.fromkeys(row["commit"] for row in rows))
    lines = [
        f"{title}, {rows[0]['device']}, commit {commits}, {rows[0]['versions']}",
        "",
        "| net and GPUs | dtype | batch a GPU | provider | " + " | ".join(SCALING.values()) + " |",
        "|---|---|---|---|" + "---|" * len(SCALING),
    ]
    for key, figures in found.items():
        cells = [
            f"{figures[m]:.1%}" if m == "efficiency" else f"{figures[m]:.4g}" if m in figures else "" for m in SCALING
        ]
        lines.append("| " + " | ".join((*key, *cells)) + " |")
    return "\n".join((*lines, *(["", f"Failed: {'; '.join(failed)}."] if failed else [])))
