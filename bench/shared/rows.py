"""Rows of bench/results/*.csv, as tables and figures read them: by question, by device, by case; and the gain of a case."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence

from bench.shared.record import RESULTS

Row = dict[str, str]
Setting = tuple[str, str, str]
LATENCIES = ("latency_ms", "step_ms")
"""Metrics that say how long a provider takes for a whole net."""

COMPILERS = ("inductor.", "jax", "onnxruntime", "openvino")
"""Beginnings of the names of providers that fuse and choose: the strong ones."""


def rows_of(question: str) -> list[list[Row]]:
    """The rows of a question, a list for each device's file."""
    found: list[list[Row]] = []
    for path in sorted(RESULTS.glob(f"{question}-*.csv")):
        with path.open(encoding="utf-8", newline="") as file:
            rows = [row for row in csv.DictReader(file) if row["question"] == question]
        if rows:
            found.append(rows)
    return found


def preferred_first(devices: Sequence[list[Row]]) -> list[list[Row]]:
    """The same devices: GPUs first, of them the one on which most cases were measured, then H100s."""

    def order(rows: list[Row]) -> tuple[bool, int, bool]:
        cases = {(row["subject"], row["dtype"], row["batch"]) for row in rows if row["provider"].startswith("convoy")}
        return "NVIDIA" not in rows[0]["device"], -len(cases), "H100" not in rows[0]["device"]

    return sorted(devices, key=order)


def settings(rows: Sequence[Row]) -> dict[Setting, dict[str, Row]]:
    """Latencies by provider, for each (net, dtype, batch), in order of dtype, batch and net.

    Numerics that are not PyTorch's own stand beside the dtype.
    """
    found: dict[Setting, dict[str, Row]] = {}
    for row in rows:
        if row["metric"] in LATENCIES:
            dtype = f"{row['dtype']} strict" if row["numerics"] == "strict" else row["dtype"]
            found.setdefault((row["subject"], dtype, row["batch"]), {})[row["provider"]] = row
    return {case: found[case] for case in sorted(found, key=lambda case: (case[1], int(case[2]), case[0]))}


def geometric_mean(values: Sequence[float]) -> float:
    """Geometric mean of at least one value."""
    return math.exp(sum(map(math.log, values)) / len(values))


def gain_of(by_provider: dict[str, Row]) -> float | None:
    """The best other provider's time over Convoy's; None where no compiler was among the others, which would flatter."""
    right = {name: float(row["p50"]) for name, row in by_provider.items() if row["ok"] == "true"}
    others = {name: time for name, time in right.items() if not name.startswith("convoy")}
    if "convoy" not in right or not any(name.startswith(COMPILERS) for name in others):
        return None
    return min(others.values()) / right["convoy"]
