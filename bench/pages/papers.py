"""What each of the five papers claims, and what a fair run gives: the figures of docs/results/papers.md, from bench/results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from bench.shared.rows import Row, geometric_mean, preferred_first, rows_of

NONE = "Not measured yet."

RESULTS_PAGE = Path(__file__).parents[2] / "docs" / "results" / "papers.md"

ZERO_SHARES = ((0, 30), (30, 60), (60, 80), (80, 100))
"""Ranges of the share of zeros, in per cent."""


def origin(rows: Iterable[Row]) -> str:
    """Device and commits of rows, for the end of a line."""
    listed = list(rows)
    commits = ", ".join(dict.fromkeys(row["commit"] for row in listed))
    return f"{listed[0]['device']}, commit {commits}"


def strategies() -> str:
    """One algorithm for all layers, the library's own choice and the best of each layer, over the choice for the whole net."""
    words = {
        "convoy.one_algorithm": "one algorithm",
        "convoy.library": "the library's choice",
        "convoy.per_layer": "per layer",
    }
    for rows in preferred_first(rows_of("study")):
        own = [row for row in rows if row["metric"] == "total_us"]
        cases = _cases(own)
        lines = ["| net | dtype | batch | " + " | ".join(words.values()) + " |", "|---|---|---|---|---|---|"]
        for (net, dtype, batch), by_provider in cases.items():
            if "convoy.exact" not in by_provider:
                continue
            exact = float(by_provider["convoy.exact"]["p50"])
            cells = [f"{float(by_provider[name]['p50']) / exact:.2f}x" if name in by_provider else "" for name in words]
            lines.append(f"| {net} | {dtype} | {batch} | " + " | ".join(cells) + " |")
        if len(lines) > 2:
            return "\n".join([f"Time over that of the exact choice for the whole net, {origin(own)}.", "", *lines])
    return NONE


def zeros() -> str:
    """ECR over cuDNN's best plan and over the best dense engine, by the share of zeros."""
    devices = sorted(rows_of("zeroskip"), key=lambda rows: -sum(row["provider"] == _ECR for row in rows))
    for rows in devices:
        own = [row for row in rows if row["metric"] == "kernel_us" and row["note"].startswith("zeros ")]
        own = [row for row in own if ":strict:" in row["subject"]]
        cases = _cases(own, lambda row: (row["subject"], *row["note"].split()[1:4:2]))
        cases = {case: by for case, by in cases.items() if {_ECR, "cudnn.best", "convoy.dense"} <= by.keys()}
        lines = ["| zeros | ECR over cuDNN's best | ECR over the best dense engine | layers |", "|---|---|---|---|"]
        for low, high in ZERO_SHARES:
            found = [by for (_, share, *_), by in cases.items() if low <= int(share) < high]
            over = [_mean(found, name) for name in ("cudnn.best", "convoy.dense")]
            if any(over):
                lines.append(f"| {low} to {high} % | {over[0] or ''} | {over[1] or ''} | {len(found)} |")
        if len(lines) > 2:
            return "\n".join([f"Geometric means over layers, strict fp32, {origin(own)}.", "", *lines])
    return NONE


def options() -> str:
    """PyTorch's options together over its defaults."""
    for rows in preferred_first(rows_of("options")):
        own = [row for row in rows if row["metric"] == "latency_ms"]
        cases = _cases(own, lambda row: (row["subject"], row["dtype"], row["batch"], row["commit"]))
        lines = ["| net | dtype | batch | defaults ms | best options ms | gain |", "|---|---|---|---|---|---|"]
        for (net, dtype, batch, _), by in cases.items():
            if {"torch.defaults", "torch.best"} <= by.keys():
                before, after = (float(by[name]["p50"]) for name in ("torch.defaults", "torch.best"))
                lines.append(f"| {net} | {dtype} | {batch} | {before:.2f} | {after:.2f} | {before / after:.2f}x |")
        if len(lines) > 2:
            return "\n".join([f"{origin(own)}.", "", *lines])
    return NONE


def generated() -> str:
    """Generated code over the same sparse product with an index array, and over the best dense engine, by sparsity."""
    for rows in preferred_first(rows_of("pruned")):
        own = [row for row in rows if row["metric"] == "kernel_us" and " unstructured " in f" {row['note']} "]
        cases = _cases(own, lambda row: (*row["note"].split()[:3], row["batch"], row["dtype"]))
        groups: dict[tuple[str, str], list[Mapping[str, Row]]] = {}
        for (_, _, sparsity, batch, _), by in cases.items():
            if "convoy.pruned.cuda" in by or "convoy.pruned.c" in by:
                groups.setdefault((sparsity, batch), []).append(by)
        lines = ["| sparsity | batch | over CSR arrays | over cuDNN's best | operators |", "|---|---|---|---|---|"]
        for (sparsity, batch), found in sorted(groups.items(), key=lambda item: (int(item[0][1]), item[0][0])):
            over = [_mean(found, name, _GENERATED) or "" for name in ("convoy.pruned.csr", "cudnn.best")]
            lines.append(f"| {sparsity} | {batch} | {over[0]} | {over[1]} | {len(found)} |")
        if len(lines) > 2:
            return "\n".join([f"Geometric means over operators, {origin(own)}.", "", *lines])
    return NONE


def streams() -> str:
    """The same kernels on several streams over one stream, in training."""
    for rows in preferred_first(rows_of("training")):
        own = [row for row in rows if row["metric"] == "step_ms"]
        cases = {case: by for case, by in _cases(own).items() if {"convoy.serial", "convoy.streams"} <= by.keys()}
        gains = {
            case: float(by["convoy.serial"]["p50"]) / float(by["convoy.streams"]["p50"]) for case, by in cases.items()
        }
        if gains:
            lines = [f"| {net} | {dtype} | {batch} | {gain:.2f}x |" for (net, dtype, batch), gain in gains.items()]
            used = [row for by in cases.values() for row in by.values() if row["provider"].startswith("convoy.")]
            head = [f"{origin(used)}; geometric mean **{geometric_mean(list(gains.values())):.2f}x**.", ""]
            return "\n".join([*head, "| net | dtype | batch | streams over one stream |", "|---|---|---|---|", *lines])
    return NONE


PAPERS: Mapping[str, Callable[[], str]] = {
    "paper-strategies": strategies,
    "paper-zeros": zeros,
    "paper-options": options,
    "paper-generated": generated,
    "paper-streams": streams,
}
"""Markers of the page, and what writes the text between them."""

_ECR = "convoy.zeroskip.ecr"
_GENERATED = ("convoy.pruned.cuda", "convoy.pruned.c")

Key = tuple[str, ...]


def _cases(rows: Sequence[Row], key: Callable[[Row], Key] | None = None) -> dict[Key, dict[str, Row]]:
    """Right rows by case, and by provider within it."""
    found: dict[Key, dict[str, Row]] = {}
    for row in rows:
        if row["ok"] == "true":
            case = key(row) if key else (row["subject"], row["dtype"], row["batch"])
            found.setdefault(case, {})[row["provider"]] = row
    return found


def _mean(found: Sequence[Mapping[str, Row]], over: str, own: Sequence[str] = (_ECR,)) -> str:
    """Geometric mean of how many times as fast one provider is as another; empty where no case has both."""
    gains = [
        float(by[over]["p50"]) / float(by[name]["p50"]) for by in found for name in own if name in by and over in by
    ]
    return f"{geometric_mean(gains):.2f}x" if gains else ""
