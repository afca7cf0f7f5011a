"""Writes the figures of the pages from bench/results/*.csv, between their markers; never by hand.

Run it to rewrite the pages, after bench/pages/draw_figures.py where figures have changed. With `--check` it writes nothing and
exits with 1 where a page differs from the files. README.md shows one device of each question (the GPU with most cases),
other pages show all.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from html import unescape
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, which holds the package `bench`

from bench.compare.compare_tables import compare_table
from bench.compare.options_table import options_table
from bench.first_answer import first_answer_table
from bench.guard_cost.guard_cost_table import guard_cost_table
from bench.inference.ablation_tables import ablation_table
from bench.inference.fair_tables import fair_table
from bench.inference.last_reads_table import last_reads_table
from bench.inference.latency_tables import latency_table
from bench.layers.cpu_layer_tables import cpu_layers_table
from bench.layers.gpu_layer_tables import gpu_layers_table
from bench.package import package_table
from bench.pages.answers import answers_table, headline, tuning_times
from bench.pages.papers import PAPERS
from bench.pruned.pruned_tables import pruned_net_table, pruned_table
from bench.regions.tuned_regions import tuned_regions_table
from bench.scaling.network_model import network_table, parts_table
from bench.scaling.scaling_tables import scaling_table
from bench.serving import serving_table
from bench.shared.fair import before_replays
from bench.shared.rows import Row, preferred_first, rows_of
from bench.study.strategies_table import strategies_table
from bench.sweep.zoo_table import zoo_table
from bench.tuning.choice_tables import (
    criteria_table,
    prediction_table,
    retuning_table,
    selection_table,
    tuning_memory_table,
)
from bench.tuning.tuned_share import tuned_share_table
from bench.tuning.versions import versions_table
from bench.zeroskip.zeroskip_tables import zeroskip_table

ROOT = Path(__file__).parents[2]
FIGURES = ROOT / "docs" / "figures"
STALE_WEIGHTS = ROOT / "docs" / "concepts" / "stale-weights.md"
LAST_READS = ROOT / "docs" / "kernels" / "last-reads.md"
PAGES = (ROOT / "README.md", STALE_WEIGHTS, LAST_READS, *sorted((ROOT / "docs" / "results").glob("*.md")))


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


def whole_nets(rows: Sequence[Row], title: str) -> str:
    """Like with like where the rows have replays, calls and latencies; rows from before have one figure a provider."""
    fair, older = fair_table(rows, title), before_replays(rows)
    if not fair or not older:
        return fair or latency_table(rows, title)
    return f"{fair}\n\n{latency_table(older, f'{title}, by older code, one figure a provider')}"


def ablations(question: str, title: str) -> str:
    """The tables of those devices on which steps were timed apart."""
    found = [ablation_table(before_replays(rows) or rows, title) for rows in preferred_first(rows_of(question))]
    return "\n\n".join(filter(None, found)) or "Not measured yet."


def render(page: Path) -> dict[str, str]:
    """Marker name → text, for one page."""
    every = page.name != "README.md"
    return {
        **{name: write() for name, write in PAPERS.items()},
        "headline": headline(),
        "answers": answers_table(),
        "tuning-times": tuning_times(),
        "guard-cost": section("guard-cost", guard_cost_table, "Cost of the check", all_devices=every),
        "last-reads": section("last-reads", last_reads_table, "Last reads of large values", all_devices=every),
        "inference": section("inference", whole_nets, "Whole nets on a GPU", all_devices=every),
        "cpu-inference": section("cpu-inference", whole_nets, "Whole nets on a CPU", all_devices=every),
        "cpu-layers": section("cpu-layers", cpu_layers_table, "Convolutions on a CPU", all_devices=every),
        "layers": section("layers", gpu_layers_table, "Single layers", all_devices=every),
        "prediction": section("prediction", prediction_table, "Layers left out one by one", all_devices=every),
        "retuning": section("retuning", retuning_table, "Tuning twice", all_devices=every),
        "tuning-memory": section("tuning-memory", tuning_memory_table, "Memory of tuning", all_devices=every),
        "first-answer": section("first-answer", first_answer_table, "First answers", all_devices=every),
        "tuned-share": section("tuned-share", tuned_share_table, "Speed by time of tuning", all_devices=every),
        "tuned-regions": section("tuned-regions", tuned_regions_table, "Subgraphs", all_devices=every),
        "versions": section("versions", versions_table, "Two versions", all_devices=every),
        "package": section("package", package_table, "Packages", all_devices=every),
        "serving": section("serving", serving_table, "Serving", all_devices=every),
        "criteria": section("criteria", criteria_table, "Layers and nets left out", all_devices=every),
        "compare": section("compare", compare_table, "Frameworks side by side", all_devices=every),
        "compare-figure": figures("compare", page, all_devices=every),
        "options": section("options", options_table, "PyTorch's options", all_devices=every),
        "options-figure": figures("options", page, all_devices=every),
        "strategies": section("study", strategies_table, "Strategies", all_devices=every),
        "study-figure": figures("study", page, all_devices=every),
        "training": section("training", whole_nets, "A training step, update included", all_devices=every),
        "training-ablation": ablations("training", "A training step by steps"),
        "inference-ablation": ablations("inference", "Inference by steps"),
        "scaling-figure": figures("scaling", page, all_devices=every),
        "scaling": section("scaling", scaling_table, "Data-parallel training", all_devices=every),
        "scaling-parts": section("scaling", parts_table, "What several GPUs add to a step", all_devices=every),
        "scaling-network": section("scaling", network_table, "Efficiency over a network", all_devices=every),
        "pruned": section("pruned", pruned_table, "Pruned weights", all_devices=every),
        "pruned-net": section("pruned-net", pruned_net_table, "Pruned nets", all_devices=every),
        "zeroskip": section("zeroskip", zeroskip_table, "Zeros in feature maps", all_devices=every),
        "zoo": section("zoo", zoo_table, "Families of timm and torchvision", all_devices=every),
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
