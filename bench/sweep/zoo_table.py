"""The table of bench/zoo.py: each net, how Convoy runs it, its error, and how fast it is where that was timed."""

from __future__ import annotations

import math
from collections.abc import Sequence

from bench.shared.rows import Row, geometric_mean

LONGEST_REASON = 160
"""Characters of a reason that the table shows."""


def zoo_table(rows: Sequence[Row], title: str) -> str:
    """A line for each net: inference, then the training step; failures first in words, below the table."""
    nets: dict[str, dict[str, Row]] = {}
    for row in rows:
        nets.setdefault(row["subject"], {})[row["metric"]] = row
    ups = [float(found["speedup"]["p50"]) for found in nets.values() if "speedup" in found]
    means = f"; inference {geometric_mean(ups):.2f}x in the mean, {min(ups):.2f}x at least" if ups else ""
    counts = {mode: _count(nets, metric) for mode, metric in (("inference", "error"), ("training", "training_error"))}
    lines = [
        f"{title}, {rows[0]['device']}, commit {rows[0]['commit']}, {rows[0]['versions']}; {rows[0]['protocol']}",
        "",
        f"{len(nets)} nets. {'; '.join(f'{mode}: {count}' for mode, count in counts.items() if count)}{means}.",
        "",
        "| net | inference | error | first answer | speed-up | own engines | training step | error |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [f"| {net} | {' | '.join(_cells(found))} |" for net, found in sorted(nets.items())]
    failures = [
        f"| {net} | {mode} | {_escaped(found[metric]['note'])} |"
        for net, found in sorted(nets.items())
        for mode, metric in (("inference", "error"), ("training", "training_error"))
        if metric in found and (found[metric]["ok"] == "false" or found[metric]["note"].startswith("stock"))
    ]
    if failures:
        lines += ["", "| net | mode | not captured, or failed |", "|---|---|---|", *failures]
    return "\n".join(lines)


def _count(nets: dict[str, dict[str, Row]], metric: str) -> str:
    """How many nets run how."""
    kinds = [found[metric]["note"].partition(" ")[0] for found in nets.values() if metric in found]
    wrong = sum(found[metric]["ok"] == "false" for found in nets.values() if metric in found)
    known = [f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(sorted(kinds))]
    return ", ".join([*known, f"{wrong} not right"]) if kinds else ""


def _cells(found: dict[str, Row]) -> list[str]:
    kind, error = _mode(found, "error")
    training, training_error = _mode(found, "training_error")
    first, up, own = (found.get(metric) for metric in ("first_s", "speedup", "own_share"))
    return [
        kind,
        error,
        f"{float(first['p50']):.1f} s" if first else "",
        f"{float(up['p50']):.2f}x" if up else "",
        f"{float(own['p50']):.0%}" if own else "",
        training,
        training_error,
    ]


def _mode(found: dict[str, Row], metric: str) -> tuple[str, str]:
    """How a net runs, and its error."""
    row = found.get(metric)
    if row is None:
        return "", ""
    error = float(row["p50"])
    kind = row["note"].partition(" ")[0]
    wrong = row["ok"] == "false" and kind != "failed"
    return f"{kind}, wrong" if wrong else kind, "" if math.isnan(error) else f"{error:.1e}"


def _escaped(note: str) -> str:
    """A reason as a cell of a table."""
    short = note if len(note) <= LONGEST_REASON else f"{note[:LONGEST_REASON]}..."
    return short.replace("|", "\\|").replace("<", "&lt;")
