"""What each step gives: PyTorch launch by launch, as one graph, then Convoy's stages, from rows of training or inference."""

from __future__ import annotations

from collections.abc import Sequence

from bench.shared.rows import Row

STAGES = {
    "convoy.serial": "algorithms, one stream",
    "convoy.streams": "streams",
    "convoy.admission": "nothing merged",
    "convoy.late_update": "admission, merging",
}
"""Convoy with less, in the order in which it is built up."""

STEPS = {"torch.eager": "eager", "torch.graph": "one graph", **STAGES, "convoy": "all of Convoy"}


def ablation_table(rows: Sequence[Row], title: str) -> str:
    """Nets down, steps across: milliseconds, and how many times as fast as the step before; empty without any."""
    cases: dict[tuple[str, str, int], dict[str, float]] = {}
    for row in rows:
        if row["metric"] in ("step_ms", "latency_ms") and row["ok"] == "true" and row["provider"] in STEPS:
            case = cases.setdefault((row["subject"], row["dtype"], int(row["batch"])), {})
            case[row["provider"]] = float(row["p50"])
    cases = {case: times for case, times in cases.items() if times.keys() & STAGES.keys() and "convoy" in times}
    if not cases:
        return ""
    known = [name for name in STEPS if any(name in times for times in cases.values())]
    commits = ", ".join(dict.fromkeys(row["commit"] for row in rows if row["provider"] in STAGES))
    lines = [
        f"{title}, {rows[0]['device']}, commit {commits}; milliseconds, and times as fast as the step before",
        "",
        "| net | dtype | batch | " + " | ".join(STEPS[name] for name in known) + " | streams and merging |",
        "|---|---|---|" + "---|" * (len(known) + 1),
    ]
    for (subject, dtype, batch), times in cases.items():
        cells, before = [], 0.0
        for name in known:
            now = times.get(name)
            cells.append("" if now is None else f"{now:.3f}" + (f" ({before / now:.2f}x)" if before else ""))
            before = now or before
        whole = f"{times['convoy.serial'] / times['convoy']:.2f}x" if "convoy.serial" in times else ""
        lines.append(f"| {subject} | {dtype} | {batch} | " + " | ".join([*cells, whole]) + " |")
    return "\n".join(lines)
