"""Tables of single layers on a CPU (bench/cpu_layers.py): a net's layers of a kind added up, engine by engine."""

from __future__ import annotations

from collections.abc import Sequence

Row = dict[str, str]

NAMES = {"convoy.aten": "PyTorch", "convoy.onednn": "oneDNN, packed weights"}
"""Providers that have other names in the table; all others are ours."""


def cpu_layers_table(rows: Sequence[Row], title: str) -> str:
    """Nets and kinds of layers down, engines across: milliseconds of all of them, and how fast the best of ours multiplies."""
    sums: dict[tuple[str, str, str], dict[str, float]] = {}
    flops: dict[tuple[str, str, str], float] = {}
    for row in rows:
        words = dict(word.split("=", 1) for word in row["note"].split() if "=" in word)
        case = row["subject"].split()[0], row["batch"], words["kind"].replace("_", " ")
        name = NAMES.get(row["provider"], "ours")
        took = sums.setdefault(case, {})
        took[name] = took.get(name, 0.0) + int(words["times"]) * float(row["p50"]) / 1e3
        if name == "ours":
            flops[case] = flops.get(case, 0.0) + int(words["times"]) * float(words["flops"])
    commits = ", ".join(dict.fromkeys(row["commit"] for row in rows))
    names = [*NAMES.values(), "ours"]
    lines = [
        f"{title}, {rows[0]['device']}, commit {commits}, {rows[0]['versions']}; milliseconds of all layers of a kind",
        "",
        f"| net | batch | layers | {' | '.join(names)} | over the better of both | ours, GFLOP/s |",
        "|---|---|---|" + "---|" * (len(names) + 2),
    ]
    for case, took in sums.items():
        gain = min(took[name] for name in NAMES.values()) / took["ours"]
        cells = " | ".join(f"{took[name]:.2f}" for name in names)
        lines.append(f"| {' | '.join(case)} | {cells} | {gain:.2f}x | {flops[case] / took['ours'] / 1e6:.0f} |")
    return "\n".join(lines)
