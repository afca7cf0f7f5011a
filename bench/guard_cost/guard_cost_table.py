"""The table of `bench/guard_cost/guard_cost.py`'s rows."""

from __future__ import annotations

from collections.abc import Sequence

from bench.shared.fair import newest_commit
from bench.shared.rows import Row

COLUMNS = (
    ("check on the host", "convoy.check", "check_us"),
    ("host time of a call", "convoy", "host_us"),
    ("without the check", "convoy.unchecked", "host_us"),
    ("replay", "convoy.replay", "call_us"),
    ("calls in a row", "convoy", "call_us"),
    ("without the check", "convoy.unchecked", "call_us"),
)
"""Heading, provider and metric of each column."""


def guard_cost_table(rows: Sequence[Row], title: str) -> str:
    """A row for each net and dtype, of the newest commit; microseconds."""
    newest = newest_commit(rows)
    cases: dict[tuple[str, str, str], dict[tuple[str, str], str]] = {}
    for row in newest:
        case = cases.setdefault((row["subject"], row["dtype"], row["batch"]), {})
        case[row["provider"], row["metric"]] = f"{float(row['p50']):.1f}"
    lines = [
        f"{title}, {newest[0]['device']}, commit {newest[0]['commit']}; microseconds, {newest[0]['protocol']}",
        "",
        f"| net | dtype | batch | {' | '.join(head for head, _, _ in COLUMNS)} |",
        f"|{'---|' * (3 + len(COLUMNS))}",
    ]
    for case, found in cases.items():
        cells = (found.get((provider, metric), "") for _, provider, metric in COLUMNS)
        lines.append(f"| {' | '.join((*case, *cells))} |")
    return "\n".join(lines)
