"""How much faster is a net, each provider in a process of its own? Questions `inference`, `cpu-inference`, `training`.

Each provider is built and checked against float64 in a process of its own. All that are ready are then timed in turn, in an order
drawn anew in each round; nothing else runs on the host. Metrics: `replay_ms` (the device's work alone, as a captured graph),
`call_ms` (calls back to back, input copies and checks included), `latency_ms` and `latency_p99_ms` (one call and a wait),
`images_per_s`, `peak_memory_bytes`, `compile_s`. A provider that fails or gives wrong results has a row that says so.

    python bench/inference/own_processes.py [--mode training] [--nets resnet50,googlenet] [--batch 1,32] [--dtype fp16,fp32]
        [--providers convoy,torch.graph,...] [--db FILE] [--tune-seconds N] [--seconds N] [--run FILE] [--folder DIR] [--prepared]
        [--beside] [--together N] [--jobs N]

The same command goes on where the last one ended: with `--seconds` it ends in time and names what is missing. After
`bench/inference/prepare.py` the compilers' caches and Convoy's plans are there; `--prepared` leaves `compile_s` out. Then
`--together 4 --jobs 12` builds four cases side by side and times them one by one, when no process builds; there is no `compile_s`
then either. On a host of several GPUs, `--beside` lets commands run side by side, each with its own nets and its own
CUDA_VISIBLE_DEVICES; their rows say so.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # the repository, which holds the package `bench`

from bench.inference.providers import PROVIDERS
from bench.shared.command_line import counts, run_main
from bench.shared.quiet import require_quiet
from bench.shared.record import Recorder
from bench.shared.timed_code import whole_net_code

from convoy.compare.case import Case
from convoy.compare.comparison import compare
from convoy.compare.frameworks import Entry
from convoy.compare.limits import Limits
from convoy.compare.runs.rows import Row
from convoy.compare.runs.runfile import Run
from convoy.measurement import detect_target

NETS = "alexnet,vgg16,vgg19,googlenet,resnet50,inception_v3,mobilenet_v2,densenet121,efficientnet_b0,convnext_tiny,regnet_y_3_2gf"

METRICS = (
    "replay_ms", "call_ms", "latency_ms", "latency_p99_ms", "images_per_s", "peak_memory_bytes", "compile_s", "energy_j",
)  # fmt: skip

COMPILE_S = 600.0
"""Seconds that a provider may take to compile: ten minutes for Inductor's `max-autotune`."""

QUESTIONS = {
    ("inference", "cuda"): "inference",
    ("inference", "cpu"): "cpu-inference",
    ("training", "cuda"): "training",
    ("training", "cpu"): "training",
}

THREADS = 2
"""Of a CPU, where that is the device."""


def cases_of(options: argparse.Namespace) -> list[Case]:
    """Every net in every dtype at every batch size."""
    return [
        Case(
            net, batch=batch, dtype=dtype, mode=options.mode, device=options.device, threads=THREADS,
            effort=options.effort, time_s=options.tune_seconds, db=options.db, trust=True,
        )
        for net in options.nets.split(",")
        for dtype in options.dtype.split(",")
        for batch in options.batch
    ]  # fmt: skip


def entries_of(words: str) -> list[Entry]:
    """Providers by name; raises SystemExit for another name."""
    unknown = [word for word in words.split(",") if word not in PROVIDERS]
    if unknown:
        raise SystemExit(f"--providers: got {unknown[0]!r}, expected names among {', '.join(PROVIDERS)}")
    return [PROVIDERS[word] for word in words.split(",")]


def machine_of(manifest: dict[str, Any]) -> dict[str, str]:
    """The host, the GPU and its state, as a recorder takes them."""
    before, after = manifest.get("clocks", {}), manifest.get("clocks_after", {})
    clocks = " to ".join(str(state["clocks.sm"]) for state in (before, after) if state.get("clocks.sm"))
    return {
        "host": str(manifest.get("system", {}).get("host", "")),
        "gpu": str(before.get("uuid", "")),
        "clocks": clocks,
        "temperature": str(after.get("temperature.gpu", "")),
        "power_limit": str(before.get("power.limit", "")),
    }


BESIDE = "; other cases ran on other GPUs of the host"
"""Behind the protocol of rows that were taken with `--beside`."""


def record(run: Run, question: str, folder: Path | None, *, prepared: bool = False, beside: bool = False) -> Path:
    """Write the rows of a run as a result file: a line for each figure, and one for each failure.

    Args:
        run: what was measured.
        question: the result file's question.
        folder: where it goes; None: `bench/results`.
        prepared: whether compilers found their caches, so that seconds of compiling mean nothing.
        beside: whether other cases ran on other GPUs of the host.
    """
    manifest = dict(run.manifest)
    recorder = Recorder(
        question,
        device=str(manifest["target"]["name"]),
        versions=" ".join(f"{name}={version}" for name, version in manifest["versions"].items()),
        protocol=str(manifest["protocol"]) + (BESIDE if beside else ""),
        folder=folder,
        commit=str(manifest["commit"]),
        date=str(manifest["date"]),
        machine=machine_of(manifest),
        code=whole_net_code(str(manifest["target"]["device"])),
    )
    for row in run.rows:
        _add(recorder, row, [name for name in METRICS if name != "compile_s" or not prepared])
    return recorder.write()


def _add(recorder: Recorder, row: Row, metrics: Sequence[str]) -> None:
    common: dict[str, Any] = {
        "subject": row.subject, "batch": row.batch, "dtype": row.dtype, "provider": row.provider, "processes": "own",
    }  # fmt: skip
    if not row.ok:
        recorder.add(
            metric="call_ms", unit="ms", p50=math.nan, ok=False, note=f"{row.status}: {row.reason[:300]}", **common
        )
        return
    error = row.figure("rel_l2_error")
    note = row.setting + (f"; rel_l2_to_float64={error.p50:.1e}" if error else "") + ("; noisy" if row.noisy else "")
    for figure in row.figures:
        if figure.metric in metrics:
            recorder.add(
                metric=figure.metric,
                unit=figure.unit,
                p50=figure.p50,
                p20=figure.p20,
                p80=figure.p80,
                note=note,
                **common,
            )


def table(run: Run) -> str:
    """The run in a few columns, for the terminal: replay, call, latency, 99th percentile."""
    lines = [f"{'net':18} {'batch':>5} {'dtype':5} {'provider':28} {'replay':>9} {'call':>9} {'latency':>9} {'p99':>9}"]
    for row in run.rows:
        found = [row.figure(metric) for metric in METRICS[:4]]
        times = " ".join(f"{figure.p50:9.3f}" if figure else f"{'':9}" for figure in found)
        words = times if row.ok else f"{row.status}: {row.reason[:80]}"
        lines.append(f"{row.subject:18} {row.batch:5} {row.dtype:5} {row.provider:28} {words}")
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--mode", default="inference", choices=("inference", "training"))
    made.add_argument("--nets", default=NETS)
    made.add_argument("--batch", type=counts, default="1,32")
    made.add_argument("--dtype", default="fp16")
    made.add_argument(
        "--providers", default="convoy,torch.graph,torch.graph.nhwc,inductor.default,inductor.conv_1x1_as_mm"
    )
    made.add_argument("--device", default="cuda")
    made.add_argument("--effort", default="quick")
    made.add_argument("--db", default="")
    made.add_argument("--tune-seconds", type=float, default=0.0)
    made.add_argument("--seconds", type=float, default=0.0)
    made.add_argument("--run", type=Path, help="the run file, from which the same command goes on")
    made.add_argument("--folder", type=Path)
    made.add_argument("--prepared", action="store_true", help="after bench/inference/prepare.py: no compile_s")
    made.add_argument(
        "--together", type=int, default=1, help="cases that are built side by side, before they are timed"
    )
    made.add_argument("--jobs", type=int, default=0, help="frameworks that are built side by side; 0: by the cores")
    made.add_argument("--beside", action="store_true", help="other commands run on other GPUs of this host")
    return made


def main() -> None:
    """Measure, print a table, write the CSV."""
    options = parser().parse_args()
    entries = entries_of(options.providers)
    require_quiet(detect_target(options.device), beside=options.beside)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    path = options.run or Path("build") / f"{options.mode}.run.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    request = {
        name: str(value)
        for name, value in vars(options).items()
        if name not in ("seconds", "run", "folder", "prepared", "together", "jobs")
    }
    run = compare(
        cases_of(options),
        entries,
        path,
        request=request,
        limits=Limits(
            timeout_s=COMPILE_S, seconds=options.seconds, jobs=options.jobs, cases=options.together, profile=False
        ),
        observer=lambda what, done, of: print(f"{done}/{of} {what}" if of else what, flush=True),
    )
    print(table(run))
    question = QUESTIONS[options.mode, options.device]
    print(
        record(run, question, options.folder, prepared=options.prepared or options.together > 1, beside=options.beside)
    )


if __name__ == "__main__":
    run_main(main)
