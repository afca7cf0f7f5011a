"""Tables of what choosing costs and how well it goes: predictions, criteria, the exact solver, tuning twice."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from bench.shared.rows import Row

MOMENTS = ("tuning_s", "retuning_s", "start_s")
"""Seconds of bench/tuning/retuning.py, in the order of their columns."""


def retuning_table(rows: Sequence[Row], title: str) -> str:
    """Seconds of a tuning from nothing, and how often a second one makes the same choice (bench/tuning/retuning.py)."""
    seconds: dict[tuple[str, str, str], dict[str, float]] = {}
    tied: dict[str, list[bool]] = {}
    for row in rows:
        if row["metric"] in MOMENTS:
            case = (row["subject"], row["dtype"], row["batch"])
            seconds.setdefault(case, {})[row["metric"]] = float(row["p50"])
        else:
            net = row["note"].split()[0]
            tied.setdefault(net, []).append("tied=true" in row["note"])
    lines = [
        f"{title}, {rows[0]['device']}, commit {rows[0]['commit']}, {rows[0]['versions']}; seconds, capture included",
        "",
        "| net | dtype | batch | from nothing | from nothing but compiled kernels | from the database | same choice or tied |",
        "|---|---|---|---|---|---|---|",
    ]
    for (net, dtype, batch), times in seconds.items():
        cells = [f"{times[moment]:.1f}" if moment in times else "" for moment in MOMENTS]
        same = tied.get(net, [])
        share = f"{sum(same)} of {len(same)} layers ({sum(same) / len(same):.0%})" if same else ""
        lines.append(f"| {net} | {dtype} | {batch} | {' | '.join(cells)} | {share} |")
    return "\n".join(lines)


def tuning_memory_table(rows: Sequence[Row], title: str) -> str:
    """What of a device's memory tuning and running take (bench/tuning/tuning_memory.py)."""
    cases: dict[tuple[str, str, str], dict[tuple[str, str], float]] = {}
    for row in rows:
        case = cases.setdefault((row["subject"], row["dtype"], row["batch"]), {})
        case[row["provider"], row["metric"]] = float(row["p50"])
    lines = [
        f"{title}, {rows[0]['device']}, commit {rows[0]['commit']}, {rows[0]['versions']}; MB, and milliseconds of the plans",
        "",
        "| net | dtype | batch | running | tuning | limit | tuning under it | plan | plan under the limit |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    free, limited = "convoy", "convoy.limited"
    for case, found in cases.items():
        sizes = (
            found[free, "running_memory_bytes"],
            found[free, "tuning_memory_bytes"],
            found[limited, "tuning_limit_bytes"],
            found[limited, "tuning_memory_bytes"],
        )
        cells = [f"{size / 1e6:.0f}" for size in sizes]
        cells += [f"{found[provider, 'latency_ms']:.3f}" for provider in (free, limited)]
        lines.append(f"| {' | '.join((*case, *cells))} |")
    return "\n".join(lines)


def prediction_table(rows: Sequence[Row], title: str) -> str:
    """How near to the best measured time the predicted choice comes, beside PyTorch's own choice."""
    lines = [
        f"{title}, {rows[0]['device']}, commit {rows[0]['commit']}, {rows[0]['protocol']}",
        "",
        "| choice | layers | geometric mean | within 5 % | within 10 % |",
        "|---|---|---|---|---|",
    ]
    for provider, words in (("convoy", "predicted"), ("convoy.aten", "PyTorch's own")):
        # A layer without a measured baseline has no figure for it.
        shares = [x for row in rows if row["provider"] == provider and not math.isnan(x := float(row["p50"]))]
        near, nearer = (sum(x >= least for x in shares) / len(shares) for least in (0.9, 0.95))
        lines.append(
            f"| {words} | {len(shares)} | {statistics.geometric_mean(shares):.3f} | {nearer:.0%} | {near:.0%} |"
        )
    return "\n".join(lines)


def selection_table(rows: Sequence[Row], title: str) -> str:
    """Seconds of the exact solver, by problem."""
    lines = [
        f"{title}, {rows[0]['device']}, commit {rows[0]['commit']}, {rows[0]['versions']}",
        "",
        "| net | problem | seconds | 20th to 80th percentile | note |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        spread = f"{float(row['p20']):.2f} to {float(row['p80']):.2f}"
        lines.append(f"| {row['subject']} | {row['metric']} | {float(row['p50']):.2f} | {spread} | {row['note']} |")
    return "\n".join(lines)


WAYS = {
    "convoy": "all three, as effort `none` does",
    "convoy.criteria": "criteria alone",
    "convoy.models": "neighbours and cost models",
    "convoy.neighbours": "neighbours alone",
    "convoy.aten": "PyTorch's own",
    "convoy.config": "all three, knobs predicted too",
}
"""Ways to choose an engine, in words."""


def criteria_table(rows: Sequence[Row], title: str) -> str:
    """Shares of layers left out on which the engine that is picked comes near the best, by way of picking and by test."""
    shares = {
        (row["subject"], row["provider"], row["metric"]): float(row["p50"])
        for row in rows
        if row["metric"] in ("within_5", "within_10")
    }
    tests = list(dict.fromkeys(subject for subject, _, _ in shares if "left out" in subject))
    heads = " | ".join(f"{test}: within {share} %" for test in tests for share in (5, 10))
    lines = [
        f"{title}, {rows[0]['device']}, commit {rows[0]['commit']}, {rows[0]['protocol']}",
        "",
        f"| picked by | {heads} |",
        "|---|" + "---|---|" * len(tests),
    ]
    for provider, words in WAYS.items():
        cells = [shares[test, provider, metric] for test in tests for metric in ("within_5", "within_10")]
        lines.append(f"| {words} | " + " | ".join(f"{cell:.1%}" for cell in cells) + " |")
    return "\n".join(lines)
