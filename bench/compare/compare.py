"""How do the frameworks stand to each other? Question `compare`, metrics `latency_ms`, `images_per_s`, `peak_memory_bytes`, ...

`convoy compare` on some nets, as CSV; run files and pages go to a folder of your choice. Run it on a quiet machine:

    python bench/compare/compare.py [--nets alexnet,googlenet,resnet50] [--batch 1,32] [--train] [--dtype fp32] [--folder runs]
                            [--tune-seconds N]
    python bench/compare/compare.py RUN.json...        # runs of `convoy compare` that are there, as CSV
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from convoy.cli.commands.compare import requested
from convoy.compare.case import Case
from convoy.compare.comparison import compare
from convoy.compare.frameworks import FRAMEWORKS, find
from convoy.compare.limits import Limits
from convoy.compare.runs.rows import Row
from convoy.compare.runs.run_page import sheet_of
from convoy.compare.runs.runfile import Run, read
from convoy.report.sheet import print_sheet, write_sheet

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, which holds the package `bench`

from bench.shared.command_line import counts, run_main
from bench.shared.record import Recorder, origin

INDUCTOR = ("reduce-overhead", "conv_1x1_as_mm", "coordinate descent", "max-autotune")
"""Words of the settings that name Inductor's options; others are its defaults."""

ALL = "all"
"""The provider in whose name the whole comparison's time is recorded, metric `comparison_s`."""

METRICS = (
    "latency_ms",
    "latency_p99_ms",
    "call_ms",
    "replay_ms",
    "images_per_s",
    "peak_memory_bytes",
    "startup_s",
    "compile_s",
    "energy_j",
)


def provider(row: Row) -> str:
    """The row's peer by its name in bench/pages/draw_figures.py: the setting that won decides."""
    layout = ".nhwc" if "channels_last" in row.setting else ""
    if row.provider == "torch":
        return ("torch.graph" if "CUDA graph" in row.setting else "torch.eager") + layout
    if row.provider == "inductor":
        options = next((name for name in INDUCTOR if name in row.setting), "default")
        return f"inductor.{options.replace(' ', '-')}"
    return row.provider


def subject(net: str, mode: str) -> str:
    """What rows of a net are about: the net, and how it runs where that is not inference."""
    return net if mode == "inference" else f"{net}:{mode}"


def record(run: Run, rows: Iterable[Row], question: str, folder: Path | None = None) -> Recorder:
    """Long-form rows of a run: a line for each figure of what worked; mode and setting stand in the note."""
    versions = run.manifest["versions"]
    recorder = Recorder(
        question,
        device=run.manifest["target"]["name"],
        versions=" ".join(f"{name}={version}" for name, version in versions.items()),
        protocol=run.manifest["protocol"],
        folder=folder,
        **origin(run.manifest),
    )
    for row in rows:
        for figure in row.figures:
            if figure.metric in METRICS:
                words = [row.mode, row.setting, "noisy" if row.noisy else ""]
                recorder.add(
                    subject=subject(row.subject, row.mode),
                    batch=row.batch,
                    dtype=row.dtype,
                    provider=provider(row),
                    metric=figure.metric,
                    unit=figure.unit,
                    p50=figure.p50,
                    p20=figure.p20,
                    p80=figure.p80,
                    note="; ".join(filter(None, words)),
                )
    return recorder


def arguments(description: str | None, nets: str) -> argparse.Namespace:
    """Options that the scripts share."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN.json")
    parser.add_argument("--nets", default=nets)
    parser.add_argument("--batch", type=counts, default="1,32")
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--device", default="")
    parser.add_argument("--frameworks", default=",".join(FRAMEWORKS))
    parser.add_argument("--options", default="all")
    parser.add_argument("--folder", type=Path, default=Path("runs"))
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--tune-seconds", type=float, default=0.0)
    return parser.parse_args()


def cases(options: argparse.Namespace, net: str) -> list[Case]:
    """A case for each batch size."""
    import torch

    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    mode = "training" if options.train else "inference"
    threads = torch.get_num_threads()
    batches = options.batch
    return [
        Case(net, "", batch, 0, options.dtype, mode, device, threads, time_s=options.tune_seconds) for batch in batches
    ]


def tell(what: str, done: int, total: int) -> None:
    print(f"{what} ({done}/{total})" if total else what, flush=True)


def main() -> None:
    """Run the comparison, print it, write the CSV, the run files and the pages."""
    options = arguments(__doc__, "alexnet,googlenet,resnet50")
    for path in options.runs:
        run = read(path)
        print_sheet(sheet_of([run]))
        print(record(run, run.rows, "compare").write())
    if options.runs:
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    for net in options.nets.split(","):
        every = cases(options, net)
        path = options.folder / f"compare-{net}-{every[0].mode}-{options.dtype}-{every[0].device}.json"
        request = requested("compare", every, Limits().rounds)
        entries = [find(word) for word in options.frameworks.split(",")]
        fresh, begun = options.again or not path.exists(), time.monotonic()
        run = compare(every, entries, path, request=request, limits=Limits(), again=options.again, observer=tell)
        sheet = sheet_of([run])
        print_sheet(sheet)
        write_sheet(sheet, path.with_suffix(".html"))
        recorder = record(run, run.rows, "compare")
        if fresh:
            took, last = time.monotonic() - begun, every[-1]
            bound = f"; tuning of a case within {options.tune_seconds:g} s" if options.tune_seconds else ""
            recorder.add(
                subject=subject(net, last.mode),
                batch=last.batch,
                dtype=last.dtype,
                provider=ALL,
                metric="comparison_s",
                unit="s",
                p50=took,
                note=f"batch {','.join(map(str, options.batch))} in one run{bound}",
            )
        print(recorder.write())


if __name__ == "__main__":
    run_main(main)
