"""Tables of single layers on a CPU (bench/layers/cpu_layers.py): a net's layers of a kind added up, engine by engine."""

from __future__ import annotations

import math
from collections.abc import Sequence

from bench.shared.rows import Row

NAMES = {"convoy.aten": "PyTorch", "convoy.onednn": "oneDNN, packed weights"}
"""Providers that have other names in the table; all others are ours."""


def cpu_layers_table(rows: Sequence[Row], title: str) -> str:
    """Nets and kinds of layers down, engines across: milliseconds of all of them, ours by each layer's fastest engine.

    The last column counts a direct sum's operations; Winograd does fewer.
    """
    layers: dict[tuple[str, str, str, str], dict[tuple[str, str], float]] = {}
    flops: dict[tuple[str, str, str, str], dict[str, float]] = {}
    for row in rows:
        words = dict(word.split("=", 1) for word in row["note"].split() if "=" in word)
        case = row["subject"].split()[0], row["dtype"], row["batch"], words["kind"].replace("_", " ")
        name = NAMES.get(row["provider"], "ours")
        if row["ok"] == "true":
            took = layers.setdefault(case, {})
            layer = name, row["subject"]
            took[layer] = min(took.get(layer, math.inf), int(words["times"]) * float(row["p50"]) / 1e3)
            flops.setdefault(case, {})[row["subject"]] = int(words["times"]) * float(words["flops"])
    commits = ", ".join(dict.fromkeys(row["commit"] for row in rows))
    names = [*NAMES.values(), "ours"]
    dtypes = " and ".join(dict.fromkeys(row["dtype"] for row in rows))
    lines = [
        f"{title}, {dtypes}, {rows[0]['device']}, commit {commits}, {rows[0]['versions']}; milliseconds of all layers of a kind",
        "",
        f"| net | dtype | batch | layers | {' | '.join(names)} | over the better of both | ours, GFLOP/s |",
        "|---|---|---|---|" + "---|" * (len(names) + 2),
    ]
    for case, took in layers.items():
        sums = {name: math.fsum(time for (engine, _), time in took.items() if engine == name) for name in names}
        gain = min(sums[name] for name in NAMES.values()) / sums["ours"]
        rate = math.fsum(flops[case].values()) / sums["ours"] / 1e6
        cells = " | ".join(f"{sums[name]:.2f}" for name in names)
        lines.append(f"| {' | '.join(case)} | {cells} | {gain:.2f}x | {rate:.0f} |")
    return "\n".join(lines)
