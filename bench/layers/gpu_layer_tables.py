"""Tables of single layers on a GPU (layers.py): each list of layers beside the best peer, and some layers one by one."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.layers.layer_data import layer_of
from bench.layers.layer_floor import floor
from bench.shared.rows import Row

from convoy.problem import ConvProblem

LISTS = Path(__file__).parent
"""Lists of layers: nets', and others."""

SINGLE = "targets"
"""The list whose layers stand one by one."""

IMAGE_CHANNELS = 3

PEERS = {"cudnn.best": "cuDNN, all plans", "torch.graph": "PyTorch"}
"""Other providers of single layers on a GPU."""


def gpu_layers_table(rows: Sequence[Row], title: str) -> str:
    """Lists of layers down: how many times as fast as the best peer ours are, layer by layer; then some layers one by one."""
    best = fastest(rows)
    commits = ", ".join(dict.fromkeys(row["commit"] for row in rows))
    lines = [
        f"{title}, {rows[0]['device']}, commit {commits}, {rows[0]['versions']}",
        "",
        "| layers | dtype | direction | batch | of them | beside | geometric mean | least | behind |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    singles: list[str] = []
    for setting in dict.fromkeys((row["dtype"], row["numerics"], int(row["batch"])) for row in rows):
        for path in sorted(LISTS.glob("*.csv")):
            for direction in ("fprop", "dgrad", "wgrad"):
                layers = _layers(path, *setting, direction)
                if all(len(best.get(key, {})) == 2 for key in layers):
                    lines.append(_list_line(path.stem, setting, direction, layers, best))
                    singles += _single_lines(layers, best, rows[0]["device"]) if path.stem == SINGLE else []
    if singles:
        heads = "| layer | dtype | batch | floor, µs | best peer, µs | ours, µs | by | gain |"
        lines += ["", heads, "|---|---|---|---|---|---|---|---|", *singles]
    return "\n".join(lines)


Fastest = Mapping[str, Mapping[bool, Row]]
"""Rows of the fastest provider by problem, and whether it is ours."""


def fastest(rows: Sequence[Row]) -> Fastest:
    found: dict[str, dict[bool, Row]] = {}
    for row in rows:
        if row["metric"] == "kernel_us" and row["ok"] == "true":
            sides, ours = found.setdefault(row["subject"], {}), row["provider"] not in PEERS
            if ours not in sides or float(row["p50"]) < float(sides[ours]["p50"]):
                sides[ours] = row
    return found


def _layers(path: Path, dtype: str, numerics: str, batch: int, direction: str) -> dict[str, int]:
    """Problems of a list, and how often each occurs; no gradient of a net's images, which training does not ask for."""
    with path.open(encoding="utf-8", newline="") as file:
        every = list(csv.DictReader(file))
    found: dict[str, int] = {}
    for row in every:
        if direction == "dgrad" and int(row["c"]) == IMAGE_CHANNELS:
            continue
        found[layer_of(row, batch, dtype, numerics, direction).key] = int(row["count"])
    return found


def _gain(sides: Mapping[bool, Row]) -> float:
    return float(sides[False]["p50"]) / float(sides[True]["p50"])


def _list_line(
    name: str, setting: tuple[str, str, int], direction: str, layers: Mapping[str, int], best: Fastest
) -> str:
    dtype, numerics, batch = setting
    gains = {key: _gain(best[key]) for key in layers}
    mean = math.exp(sum(times * math.log(gains[key]) for key, times in layers.items()) / sum(layers.values()))
    beside = " and ".join(PEERS[peer] for peer in PEERS if any(best[key][False]["provider"] == peer for key in layers))
    kind = dtype if numerics == "half" else f"{dtype} {numerics}"
    behind = sum(times for key, times in layers.items() if gains[key] < 1)
    cells = (name, kind, direction, batch, sum(layers.values()), beside)
    return f"| {' | '.join(map(str, cells))} | {mean:.2f}x | {min(gains.values()):.2f}x | {behind} |"


def _single_lines(layers: Mapping[str, int], best: Fastest, device: str) -> list[str]:
    found: list[str] = []
    for key in layers:
        peer, ours = best[key][False], best[key][True]
        problem = ConvProblem.parse(key)
        name = f"{problem.c}→{problem.k} {problem.r}x{problem.s} @{problem.h}"
        kind = peer["dtype"] if peer["numerics"] == "half" else f"{peer['dtype']} {peer['numerics']}"
        least = f"{floor(key, peer['numerics'], device):.1f}"
        times = f"{float(peer['p50']):.2f} ({peer['provider']}) | {float(ours['p50']):.2f}"
        by = ours["provider"].removeprefix("convoy.")
        found.append(f"| {name} | {kind} | {peer['batch']} | {least} | {times} | {by} | {_gain(best[key]):.2f}x |")
    return found
