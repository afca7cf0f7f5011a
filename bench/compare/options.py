"""What are PyTorch's options worth? Question `options`, metric `latency_ms`: the whole ablation, from the defaults to the best.

    torch.defaults   PyTorch as it comes
    torch.alone      the defaults with one option
    torch.step       step by step from the defaults: what was kept, with what was kept before it
    torch.without    the best setting without one of its options; without a usual one, which is on by default
    torch.best       the best setting
    torch.loader     the best training step, fed by data-loader workers; in a subject of its own, `NET:training:loader`, with
                     the best setting beside it

A note begins with the option; `kept` stands behind one that helps by more than the noise. Run it on a quiet machine:

    python bench/compare/options.py [--nets alexnet,googlenet,resnet50] [--batch 1,32] [--train] [--options all] [--folder runs]
    python bench/compare/options.py RUN.json...        # runs of `convoy compare --options` that are there, as CSV
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from convoy.cli.commands.compare import requested
from convoy.compare.limits import Limits
from convoy.compare.options.ablation import search_options
from convoy.compare.runs.rows import Row
from convoy.compare.runs.run_page import sheet_of
from convoy.compare.runs.runfile import Run, read
from convoy.report.sheet import print_sheet, write_sheet

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, which holds the package `bench`

from bench.compare.compare import METRICS, arguments, cases, record, tell
from bench.shared.command_line import run_main
from bench.shared.record import Recorder

PROVIDERS = {
    "defaults": "torch.defaults",
    "alone": "torch.alone",
    "forward": "torch.step",
    "without": "torch.without",
    "default": "torch.without",
    "loader": "torch.loader",
    "best": "torch.best",
}
"""By a row's role, its name in bench/pages/draw_figures.py."""

LOADER = PROVIDERS["loader"]


def shown(row: Row) -> bool:
    """Whether a row is part of the ablation: steps that were not kept led nowhere."""
    role = row.detail.get("role")
    return row.ok and role in PROVIDERS and (role != "forward" or bool(row.detail.get("kept")))


def recorded(run: Run) -> Recorder:
    """A line for each figure of the ablation."""
    rows = [row for row in run.rows if shown(row)]
    recorder = record(run, rows, "options")
    names = [(row, figure) for row in rows for figure in row.figures if figure.metric in METRICS]
    for line, (row, _) in zip(recorder.rows, names, strict=True):
        kept = "kept" if row.detail.get("kept") else ""
        words = str(row.detail.get("advice", row.setting))
        line["provider"] = PROVIDERS[row.detail["role"]]
        line["note"] = "; ".join(filter(None, (str(row.detail.get("option", "")), kept, words, "noisy" * row.noisy)))
    apart = [line | {"subject": f"{line['subject']}:loader"} for line in fed(recorder.rows)]
    recorder.rows = [line for line in recorder.rows if line["provider"] != LOADER] + apart
    return recorder


def fed(lines: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    """What data-loader workers are compared by: nothing where a run has none."""
    found = [line for line in lines if line["provider"] in (LOADER, PROVIDERS["best"])]
    return found if any(line["provider"] == LOADER for line in found) else []


def main() -> None:
    """Run the search, print it, write the CSV, the run files and the pages."""
    options = arguments(__doc__, "alexnet,googlenet,resnet50")
    for path in options.runs:
        run = read(path)
        print_sheet(sheet_of([run]))
        print(recorded(run).write())
    if options.runs:
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    for net in options.nets.split(","):
        every = cases(options, net)
        path = options.folder / f"options-{net}-{every[0].mode}-{every[0].device}.json"
        request = requested("options", every, Limits().rounds)
        run = search_options(
            every, options.options, path, request=request, limits=Limits(), again=options.again, observer=tell
        )
        sheet = sheet_of([run])
        print_sheet(sheet)
        write_sheet(sheet, path.with_suffix(".html"))
        print(recorded(run).write())


if __name__ == "__main__":
    run_main(main)
