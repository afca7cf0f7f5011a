"""Writes the figures of README.md and docs/results.md from bench/results/*.csv, between their markers; never by hand.

Run it to rewrite the pages; with `--check` it exits 1 where they are not what the files say.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"
PAGES = (ROOT / "README.md", ROOT / "docs" / "results.md")
Row = dict[str, str]
COMPILERS = ("inductor.", "jax", "onnxruntime", "openvino")
"""Beginnings of the names of providers that fuse and choose: the strong ones."""


def rows_of(files: str) -> list[list[Row]]:
    """The rows of a question, a list for each device's file; `files` is the question, and may begin the device's name too."""
    found: list[list[Row]] = []
    for path in sorted(RESULTS.glob(f"{files}-*.csv")):
        with path.open(encoding="utf-8", newline="") as file:
            rows = [row for row in csv.DictReader(file) if f"{files}-".startswith(row["question"] + "-")]
        if rows:
            found.append(rows)
    return found


def latency_table(rows: Sequence[Row], title: str) -> str:
    """Nets down, providers across, and Convoy's gain over the best of the others."""
    providers = list(dict.fromkeys(row["provider"] for row in rows))
    providers.sort(key=lambda name: name == "convoy")
    cases: dict[tuple[str, str, str], dict[str, Row]] = {}
    for row in rows:
        cases.setdefault((row["subject"], row["dtype"], row["batch"]), {})[row["provider"]] = row
    commits = ", ".join(dict.fromkeys(row["commit"] for row in rows))
    lines = [f"{title}, {rows[0]['device']}, commit {commits}, {rows[0]['versions']}; milliseconds, median", ""]
    lines.append("| net | dtype | batch | " + " | ".join(providers) + " | gain over the best other |")
    lines.append("|---|---|---|" + "---|" * (len(providers) + 1))
    gains: list[float] = []
    for (subject, dtype, batch), by_provider in cases.items():
        gain = gain_of(by_provider)
        if not math.isnan(gain):
            gains.append(gain)
        cells = [_cell(by_provider.get(name)) for name in providers]
        shown = "" if math.isnan(gain) else f"{gain:.2f}x"
        lines.append(f"| {subject} | {dtype} | {batch} | " + " | ".join(cells) + f" | {shown} |")
    if gains:
        mean = math.exp(sum(map(math.log, gains)) / len(gains))
        lines += ["", f"Geometric mean of the gain over the best other provider, net by net: **{mean:.2f}x**."]
    return "\n".join(lines)


def gain_of(by_provider: dict[str, Row]) -> float:
    """The best other provider's time over Convoy's; not a number where no compiler was among the others, which would flatter."""
    others = [float(r["p50"]) for name, r in by_provider.items() if name != "convoy" and r["ok"] == "true"]
    ours = by_provider.get("convoy")
    whole = ours and ours["ok"] == "true" and any(name.startswith(COMPILERS) for name in by_provider)
    return min(others) / float(ours["p50"]) if ours and whole and others else math.nan


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    return f"{float(row['p50']):.3f}" + ("" if row["ok"] == "true" else " (wrong)")


def section(question: str, table: Callable[[Sequence[Row], str], str], title: str) -> str:
    """All devices' tables of a question."""
    return "\n\n".join(table(rows, title) for rows in rows_of(question)) or "Not measured yet."


def render() -> dict[str, str]:
    """Marker name → text."""
    return {
        "inference": section("inference", latency_table, "Whole nets on a GPU"),
        "inference-h100": section("inference-nvidia-h100", latency_table, "Whole nets on a GPU"),
        "cpu-inference": section("cpu-inference", latency_table, "Whole nets on a CPU"),
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
        after = replace(before, render())
        if before != after:
            stale += 1
            print(f"{path.name}: {'is not what bench/results says' if options.check else 'rewritten'}")
            if not options.check:
                path.write_text(after, encoding="utf-8")
    return 1 if options.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
