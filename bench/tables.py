"""Writes the figures of README.md and docs/results/*.md from bench/results/*.csv, between their markers; never by hand.

Run it to rewrite the pages, after bench/plots.py where figures have changed; with `--check` it exits 1 where they are not what
the files say. README.md shows one device of each question (the GPU with most cases), docs/results/*.md all.
"""

from __future__ import annotations

import argparse
import csv
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from html import unescape
from pathlib import Path

from ablation_tables import STAGES, ablation_table
from choice_tables import criteria_table, prediction_table, retuning_table, selection_table, tuning_memory_table
from compare_tables import comparison_time, options_table, strategies_table
from gpu_layer_tables import gpu_layers_table
from layer_tables import cpu_layers_table
from pruned_tables import pruned_net_table, pruned_table
from zeroskip_tables import zeroskip_table

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"
FIGURES = ROOT / "docs" / "figures"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs" / "results").glob("*.md")))
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


def latency_table(rows: Sequence[Row], title: str) -> str:
    """Nets down, providers across, and Convoy's gain over the best of the others."""
    cases = settings(rows)
    providers = list(
        dict.fromkeys(name for by_provider in cases.values() for name in by_provider if name not in STAGES)
    )
    providers.sort(key=lambda name: name == "convoy")
    commits = ", ".join(dict.fromkeys(row["commit"] for row in rows))
    versions = "; ".join(dict.fromkeys(row["versions"] for row in rows))
    lines = [f"{title}, {rows[0]['device']}, commit {commits}, {versions}; milliseconds, median", ""]
    lines.append("| net | dtype | batch | " + " | ".join(providers) + " | gain over the best other |")
    lines.append("|---|---|---|" + "---|" * (len(providers) + 1))
    gains: dict[str, list[float]] = {}
    for (subject, dtype, batch), by_provider in cases.items():
        gain = gain_of(by_provider)
        if gain is not None:
            gains.setdefault(f"{dtype}, batch {batch}", []).append(gain)
        cells = [_cell(by_provider.get(name)) for name in providers]
        cells.append("" if gain is None else f"{gain:.2f}x")
        lines.append(f"| {subject} | {dtype} | {batch} | " + " | ".join(cells) + " |")
    if gains:
        lines += ["", _means(gains)]
    return "\n".join(lines)


def _means(gains: dict[str, list[float]]) -> str:
    """The mean of all gains, and of each kind of case where there are several."""
    every = [gain for group in gains.values() for gain in group]
    line = f"Geometric mean of the gain over the best other provider, net by net: **{geometric_mean(every):.2f}x**."
    if len(gains) < 2:
        return line
    parts = [
        f"{name} {geometric_mean(group):.2f}x over {len(group)}, least {min(group):.2f}x"
        for name, group in gains.items()
    ]
    return f"{line} By kind: {'; '.join(parts)}."


def gain_of(by_provider: dict[str, Row]) -> float | None:
    """The best other provider's time over Convoy's; None where no compiler was among the others, which would flatter."""
    right = {name: float(row["p50"]) for name, row in by_provider.items() if row["ok"] == "true"}
    others = {name: time for name, time in right.items() if not name.startswith("convoy")}
    if "convoy" not in right or not any(name.startswith(COMPILERS) for name in others):
        return None
    return min(others.values()) / right["convoy"]


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    if math.isnan(float(row["p50"])):
        return "failed"
    words = "" if row["ok"] == "true" else " (wrong)"
    return f"{float(row['p50']):.3f}{words}" + (" (noisy)" if row["note"].endswith("noisy") else "")


def compare_table(rows: Sequence[Row], title: str) -> str:
    """Latencies, and what it took to find them."""
    return "\n\n".join(filter(None, (latency_table(rows, title), comparison_time(rows))))


SCALING = {
    "images_per_s": "images/s",
    "efficiency": "efficiency",
    "step_ms": "step ms",
    "compute_ms": "computation",
    "group_ms": "cost of the process group",
    "exposed_ms": "exposed communication",
    "bound_ms": "bound of communication",
}
"""Metrics of scaling that are shown, and their heads."""


def scaling_table(rows: Sequence[Row], title: str) -> str:
    """Throughput, efficiency and where a step's time goes, by net, number of GPUs and provider."""
    found: dict[tuple[str, ...], dict[str, float]] = {}
    for row in rows:
        key = (row["subject"], row["dtype"], row["batch"], row["provider"])
        found.setdefault(key, {})[row["metric"]] = float(row["p50"])
    commits = ", ".join(dict.fromkeys(row["commit"] for row in rows))
    lines = [
        f"{title}, {rows[0]['device']}, commit {commits}, {rows[0]['versions']}",
        "",
        "| net and GPUs | dtype | batch a GPU | provider | " + " | ".join(SCALING.values()) + " |",
        "|---|---|---|---|" + "---|" * len(SCALING),
    ]
    for key, figures in found.items():
        cells = [
            f"{figures[m]:.1%}" if m == "efficiency" else f"{figures[m]:.4g}" if m in figures else "" for m in SCALING
        ]
        lines.append("| " + " | ".join((*key, *cells)) + " |")
    return "\n".join(lines)


def figure(path: Path, page: Path) -> str:
    """A picture in a page; it is described by its own title."""
    title = re.search(r"<title>(.*?)</title>", path.read_text(encoding="utf-8"))
    assert title is not None
    return f"![{unescape(title[1])}]({Path(os.path.relpath(path, page.parent)).as_posix()})"


def figures(stem: str, page: Path, *, all_devices: bool) -> str:
    """The pictures of a question, the preferred device's first."""
    paths = [path for path in (FIGURES / f"{stem}.svg",) if path.exists()]
    if all_devices:
        paths += sorted(FIGURES.glob(f"{stem}-*.svg"))
    return "\n\n".join(figure(path, page) for path in paths) or "Not measured yet."


def section(question: str, table: Callable[[Sequence[Row], str], str], title: str, *, all_devices: bool) -> str:
    """The tables of a question."""
    devices = preferred_first(rows_of(question))
    found = [table(rows, title) for rows in devices[: None if all_devices else 1]]
    return "\n\n".join(filter(None, found)) or "Not measured yet."


def ablations(question: str, title: str) -> str:
    """The tables of those devices on which steps were timed apart."""
    found = [ablation_table(rows, title) for rows in preferred_first(rows_of(question))]
    return "\n\n".join(filter(None, found)) or "Not measured yet."


QUESTIONS = {
    "inference": "inference",
    "training": "a training step, update included",
    "cpu-inference": "inference on a CPU",
}
"""Questions of the README's table, and what it calls them."""


def headline_table() -> str:
    """A row for each question, dtype and batch: the mean gain over the best other provider, the least, and the device.

    The commits of all rows stand in one footnote.
    """
    lines = ["| | dtype, batch | nets | geometric mean | least | device |", "|---|---|---|---|---|---|"]
    commits: dict[str, None] = {}
    for question, words in QUESTIONS.items():
        rows = next(iter(preferred_first(rows_of(question))), [])
        gains: dict[str, list[float]] = {}
        for (_, dtype, batch), by_provider in settings(rows).items():
            gain = gain_of(by_provider)
            if gain is not None:
                gains.setdefault(f"{dtype}, {batch}", []).append(gain)
        for kind, values in gains.items():
            figures = f"{len(values)} | **{geometric_mean(values):.2f}x** | {min(values):.2f}x"
            lines.append(f"| {words} | {kind} | {figures} | {rows[0]['device']} |")
        commits |= dict.fromkeys(row["commit"] for row in rows)
    return "\n".join([*lines, "", f"<sub>Commits of these figures: {', '.join(commits)}.</sub>"])


def render(page: Path) -> dict[str, str]:
    """Marker name → text, for one page."""
    every = page.name != "README.md"
    return {
        "headline": headline_table(),
        "inference": section("inference", latency_table, "Whole nets on a GPU", all_devices=every),
        "cpu-inference": section("cpu-inference", latency_table, "Whole nets on a CPU", all_devices=every),
        "cpu-layers": section("cpu-layers", cpu_layers_table, "Convolutions on a CPU", all_devices=every),
        "layers": section("layers", gpu_layers_table, "Single layers", all_devices=every),
        "prediction": section("prediction", prediction_table, "Layers left out one by one", all_devices=every),
        "retuning": section("retuning", retuning_table, "Tuning twice", all_devices=every),
        "tuning-memory": section("tuning-memory", tuning_memory_table, "Memory of tuning", all_devices=every),
        "criteria": section("criteria", criteria_table, "Layers and nets left out", all_devices=every),
        "compare": section("compare", compare_table, "Frameworks side by side", all_devices=every),
        "compare-figure": figures("compare", page, all_devices=every),
        "options": section("options", options_table, "PyTorch's options", all_devices=every),
        "options-figure": figures("options", page, all_devices=every),
        "strategies": section("study", strategies_table, "Strategies", all_devices=every),
        "study-figure": figures("study", page, all_devices=every),
        "training": section("training", latency_table, "A training step, update included", all_devices=every),
        "training-ablation": ablations("training", "A training step by steps"),
        "inference-ablation": ablations("inference", "Inference by steps"),
        "scaling-figure": figures("scaling", page, all_devices=every),
        "scaling": section("scaling", scaling_table, "Data-parallel training", all_devices=every),
        "pruned": section("pruned", pruned_table, "Pruned weights", all_devices=every),
        "pruned-net": section("pruned-net", pruned_net_table, "Pruned nets", all_devices=every),
        "zeroskip": section("zeroskip", zeroskip_table, "Zeros in feature maps", all_devices=every),
        "selection": section("selection", selection_table, "The exact solver", all_devices=every),
        "inference-figure": figures("inference", page, all_devices=every),
        "cpu-inference-figure": figures("cpu-inference", page, all_devices=every),
        "layers-figure": figures("layers-roofline", page, all_devices=every),
    }


def replace(page: str, sections: dict[str, str]) -> str:
    """A page with the text between its markers replaced."""
    for name, text in sections.items():
        begin, end = f"<!-- results: {name} -->", "<!-- end -->"
        if begin in page:
            head, _, rest = page.partition(begin)
            _, _, tail = rest.partition(end)
            page = f"{head}{begin}\n{text}\n{end}{tail}"
    return page


def main() -> int:
    """Rewrite or check the pages."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    stale = 0
    for path in PAGES:
        if not path.exists():
            continue
        before = path.read_text(encoding="utf-8")
        after = replace(before, render(path))
        if before != after:
            stale += 1
            print(f"{path.name}: {'is not what bench/results says' if options.check else 'rewritten'}")
            if not options.check:
                path.write_text(after, encoding="utf-8")
    return 1 if options.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
