"""The table of `bench/inference/last_reads.py`'s rows."""

from __future__ import annotations

from collections.abc import Sequence

from bench.shared.fair import newest_commit
from bench.shared.rows import Row

PROVIDERS = ("convoy.unmarked", "convoy.marked")
"""The same plan without and with marks."""


def last_reads_table(rows: Sequence[Row], title: str) -> str:
    """A row for each net, of the newest commit; microseconds a replay."""
    newest = newest_commit(rows)
    cases: dict[tuple[str, str, str], dict[str, Row]] = {}
    for row in newest:
        cases.setdefault((row["subject"], row["dtype"], row["batch"]), {})[row["provider"]] = row
    lines = [
        f"{title}, {newest[0]['device']}, commit {newest[0]['commit']}; microseconds, {newest[0]['protocol']}",
        "",
        "| net | dtype | batch | without marks | with marks | ratio | marks |",
        f"|{'---|' * 7}",
    ]
    for case, found in cases.items():
        before, after = (float(found[name]["p50"]) for name in PROVIDERS)
        marks = found[PROVIDERS[1]]["note"].split(maxsplit=1)[0]
        lines.append(f"| {' | '.join(case)} | {before:.1f} | {after:.1f} | {before / after:.3f}x | {marks} |")
    return "\n".join(lines)
