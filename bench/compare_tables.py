"""Tables of `bench/study.py` and `bench/options.py`: strategies for whole nets, and what PyTorch's options are worth."""

from __future__ import annotations

from collections.abc import Sequence

Row = dict[str, str]

STRATEGIES = {
    "convoy.library": "library",
    "convoy.one_algorithm": "one algorithm",
    "convoy.per_layer": "per layer",
    "convoy.exact": "exact",
}
"""Strategies for whole nets by provider, in words."""


def comparison_time(rows: Sequence[Row]) -> str:
    """What the comparison took, start-up, building and tuning included; empty where nobody looked at the clock."""
    taken = [row for row in rows if row["metric"] == "comparison_s"]
    if not taken:
        return ""
    parts = ", ".join(f"{row['subject']} {float(row['p50']):.0f} s" for row in taken)
    notes = "; ".join(dict.fromkeys(row["note"] for row in taken))
    return f"All of it took {sum(float(row['p50']) for row in taken):.0f} s: {parts} ({notes})."


def strategies_table(rows: Sequence[Row], title: str) -> str:
    """Sums of measured times of each strategy, how many times those of exact selection, and memory; empty without any."""
    found: dict[tuple[str, ...], dict[tuple[str, str], float]] = {}
    rows = [row for row in rows if row["provider"] in STRATEGIES]
    if not rows:
        return ""
    for row in rows:
        if row["metric"] in ("total_us", "peak_memory_bytes"):
            key = (row["subject"], row["dtype"], row["batch"], row["protocol"])
            found.setdefault(key, {})[row["provider"], row["metric"]] = float(row["p50"])
    commits = ", ".join(dict.fromkeys(row["commit"] for row in rows))
    lines = [
        f"{title}, {rows[0]['device']}, commit {commits}; milliseconds, and times exact",
        "",
        "| net | dtype | batch | "
        + " | ".join(STRATEGIES.values())
        + " | memory, MB: library | per layer | exact | from |",
        "|---|---|---|" + "---|" * (len(STRATEGIES) + 4),
    ]
    for (net, dtype, batch, protocol), figures in found.items():
        best = figures["convoy.exact", "total_us"]
        cells = [_strategy(figures.get((name, "total_us")), best) for name in STRATEGIES]
        memory = [
            f"{figures[name, 'peak_memory_bytes'] / 1e6:.1f}" if (name, "peak_memory_bytes") in figures else ""
            for name in ("convoy.library", "convoy.per_layer", "convoy.exact")
        ]
        lines.append(f"| {net} | {dtype} | {batch} | " + " | ".join([*cells, *memory, protocol]) + " |")
    return "\n".join(lines)


def _strategy(total_us: float | None, best_us: float) -> str:
    return "" if total_us is None else f"{total_us / 1e3:.3f} ({total_us / best_us:.2f}x)"


def options_table(rows: Sequence[Row], title: str) -> str:
    """What each option is worth, alone and in the best setting; a note begins with the option (bench/options.py)."""
    cases: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        if row["metric"] == "latency_ms":
            cases.setdefault((row["subject"], row["batch"], row["commit"]), []).append(row)
    blocks: list[str] = []
    for (subject, batch, commit), own in cases.items():
        best = next((row for row in own if row["provider"] == "torch.best"), None)
        defaults = next((row for row in own if row["provider"] == "torch.defaults"), None)
        if best is not None and subject.endswith(":loader"):
            blocks.append(loader_table(own, best, title))
        if best is None or defaults is None:
            continue
        advice = best["note"].split("; ", 2)[-1]
        head = (
            f"{title}, {subject}, batch {batch}, {own[0]['device']}, commit {commit}: from {float(defaults['p50']):.3f} to "
            f"{float(best['p50']):.3f} ms. {advice}"
        )
        lines = [
            head,
            "",
            "| option | alone | in the best setting |",
            "|---|---|---|",
        ]
        alone = {
            _option(row): float(defaults["p50"]) / float(row["p50"]) for row in own if row["provider"] == "torch.alone"
        }
        there = {
            _option(row).removeprefix("without "): float(row["p50"]) / float(best["p50"])
            for row in own
            if row["provider"] == "torch.without"
        }
        for name in dict.fromkeys((*sorted(alone, key=lambda n: -alone[n]), *there)):
            cells = [f"{values[name]:.2f}x" if name in values else "" for values in (alone, there)]
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) or "Not measured yet."


def loader_table(rows: Sequence[Row], best: Row, title: str) -> str:
    """A training step fed by data-loader workers, beside the best setting, whose batch is there."""
    net, batch, device, commit = (best[name] for name in ("subject", "batch", "device", "commit"))
    there = float(best["p50"])
    case = f"{net.removesuffix(':loader')}, batch {batch}, {device}, commit {commit}"
    head = f"{title}, {case}: the best setting, fed by a data loader"
    lines = [head, "", "| data loader | ms a step | over a batch that is there |", "|---|---|---|"]
    for row in rows:
        if row["provider"] == "torch.loader":
            words, noisy = _option(row), " (noisy)" if row["note"].endswith("noisy") else ""
            lines.append(f"| {words}{noisy} | {float(row['p50']):.3f} | {float(row['p50']) / there:.2f}x |")
    return "\n".join(lines)


def _option(row: Row) -> str:
    return row["note"].split("; ")[0]
