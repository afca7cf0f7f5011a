"""How does data-parallel training scale over the GPUs of a host? Question `scaling`, as long-form CSV and a run file.

One call measures a machine, the most important rows first, and ends in time:

    python bench/scaling/scaling.py --gpus 1,2,4 --nets alexnet,resnet50,googlenet --batches 128,32 --folder DIR --seconds 520

A second call with `--known DIR/scale.json` goes on where the first one ended. `--plans DIR` keeps Convoy's plans: a plan of one
number of GPUs serves the others, in later calls too. With `--beside`, jobs that do not need all GPUs run beside each other.
Run files of `convoy scale` become CSV as well:

    python bench/scaling/scaling.py scale-alexnet.json scale-resnet50.json

A row a figure of each number of GPUs and provider: throughput, efficiency, the step and where its time goes
(docs/how-to/scale.md). A job that fails is a row with ok=false and its reason.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from convoy.compare import Run, read, write
from convoy.compare.runs.manifest import make_manifest
from convoy.compare.runs.rows import Row
from convoy.compare.scaling.scaling_jobs import PROVIDER_NAMES, ScaleRequest, ScalingJob, parts_of
from convoy.compare.scaling.scaling_lines import failures, link_table, notes, settings, table
from convoy.compare.scaling.scaling_rows import count_of, with_efficiency

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, which holds the package `bench`

from bench.scaling.job_queue import Clock, run_jobs
from bench.shared.command_line import counts, run_main
from bench.shared.record import Recorder, origin

PROVIDERS = (
    "convoy", "torch.ddp", "torch.ddp.compiled", "convoy+factors", "convoy+bf16", "convoy+bf16_error_feedback",
    "torch.ddp+bf16",
)  # fmt: skip
"""The most important first."""


def recorded(run: Run, folder: Path | None = None) -> Recorder:
    """All figures of a run; of a job that failed one row without a figure."""
    target = run.manifest["target"]
    versions = " ".join(f"{name}={str(version).replace(' ', '_')}" for name, version in target["versions"].items())
    recorder = Recorder(
        "scaling",
        device=target["name"],
        versions=versions,
        protocol=run.manifest["protocol"],
        folder=folder,
        **origin(run.manifest),
    )
    for row in run.rows:
        subject = f"{row.subject} x{count_of(row)} {row.axes['scaling']}"
        common = {"subject": subject, "provider": row.provider, "batch": row.batch, "dtype": row.dtype}
        if not row.ok:
            reason = f"{row.status}: {row.reason}"
            recorder.add(metric="step_ms", unit="ms", p50=float("nan"), ok=False, note=reason, **common)
        for figure in row.figures:
            recorder.add(
                metric=figure.metric, unit=figure.unit, p50=figure.p50, p20=figure.p20, p80=figure.p80,
                numerics=row.numerics, note=f"{row.setting}{'; noisy' if row.noisy else ''}", **common,
            )  # fmt: skip
    return recorder


def jobs(options: argparse.Namespace) -> Iterator[ScalingJob]:
    """All jobs: of each batch first the fewest GPUs, which every efficiency refers to, then the most, then what lies between.

    One process sends nothing: providers that send otherwise than in fp32 have no job of one, and none but for the nets that they
    are asked for.
    """
    few, *others = sorted(options.gpus)
    for batch in options.batches:
        for count in (few, *sorted(others, reverse=True)):
            for provider in options.providers:
                otherwise = parts_of(provider)[1] is not None
                nets = [net for net in options.nets if not otherwise or net in options.compressed]
                for net in nets if not (otherwise and count == 1) else ():
                    yield ScalingJob(request_of(options, net, batch), provider, count, "weak")


def request_of(options: argparse.Namespace, net: str, batch: int) -> ScaleRequest:
    """What a job of a net and batch is asked for."""
    return ScaleRequest(
        model=net, gpus=tuple(options.gpus), batch=batch, providers=tuple(options.providers), dtype=options.dtype,
        device=options.device, size=options.size, timeout_s=options.timeout_s, round_s=options.round_s,
        effort=options.effort, db=str(options.db or ""), trust=options.trust, plans=str(options.plans or ""),
    )  # fmt: skip


def measure(options: argparse.Namespace) -> Run:
    """Run all jobs; the run file and the CSV are written after each row."""
    clock = Clock(options.seconds)
    beside = ", jobs beside each other on other GPUs" if options.beside else ""
    # Jobs that prepare together are timed when nothing prepares, so that their rows are like those of a job alone.
    protocol = f"torchrun, 7 rounds in turn of at least {options.round_s:g} s, the slowest process counts{beside}"
    asked = {"command": "bench/scaling", "dtype": options.dtype, "size": options.size, "seconds": options.round_s}
    run = Run("scaling", make_manifest(device=options.device, protocol=protocol, request=asked))
    if options.known is not None:
        known = read(options.known)
        if run.resumes(known):
            run = replace(known, rows=tuple(row for row in known.rows if row.ok))
        else:
            print(f"{options.known} is of another device, version, commit or protocol: measured anew", flush=True)
    options.folder.mkdir(parents=True, exist_ok=True)
    devices = visible_devices(options)

    def take(row: Row) -> None:
        nonlocal run
        run = run.with_row(row)
        run = replace(run, rows=tuple(with_efficiency(run.rows)))
        write(run, options.folder / "scale.json")
        recorded(run, options.folder).write()
        step = row.figure("step_ms")
        said = f"{step.p50:.3f} ms" if step is not None else f"{row.status}: {row.reason}"
        print(
            f"{clock.left_s:6.0f} s left  {row.subject} x{count_of(row)} b{row.batch} {row.provider}: {said}",
            flush=True,
        )

    todo = [job for job in jobs(options) if run.row(job.row().key) is None]
    run_jobs(todo, devices, clock, take, beside=options.beside, together=options.together)
    return run


def visible_devices(options: argparse.Namespace) -> list[str]:
    """The GPUs for jobs (on a CPU, names of no meaning), as `CUDA_VISIBLE_DEVICES` names them.

    Jobs beside each other use all that this process may: as many as there are, not as the largest job needs.
    """
    most = max(options.gpus)
    count = max(most, torch.cuda.device_count()) if options.beside and options.device == "cuda" else most
    given = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return (given or [str(index) for index in range(count)])[:count]


def tell(run: Run) -> None:
    """The tables, and what belongs to their rows."""
    print("\n".join("  ".join(line) for line in (*table(run.rows), *link_table(run.rows))))
    print("\n".join((*settings(run.rows), *notes(run.rows), *failures(run.rows))))


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def _provider_words(text: str) -> list[str]:
    words = _words(text)
    unknown = set(words) - set(PROVIDER_NAMES)
    if unknown:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: expected some of {', '.join(PROVIDER_NAMES)}")
    return words


def parser() -> argparse.ArgumentParser:
    """The options of the command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument(
        "runs", nargs="*", type=Path, metavar="RUN.json", help="run files to turn into CSV; none: measure"
    )
    made.add_argument("--folder", type=Path, help="where the CSV and the run file are written")
    made.add_argument("--gpus", type=counts, default=[1, 2, 4])
    made.add_argument("--nets", type=_words, default=["alexnet", "resnet50", "googlenet"])
    made.add_argument("--batches", type=counts, default=[128, 32], help="images of a GPU")
    made.add_argument("--providers", type=_provider_words, default=list(PROVIDERS))
    made.add_argument(
        "--compressed",
        type=_words,
        default=["alexnet"],
        help="nets whose gradients are also sent in bf16, or as factors",
    )
    made.add_argument("--dtype", default="bf16")
    made.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    made.add_argument("--size", type=int, default=0, help="of the images; 0: the net's own")
    made.add_argument("--effort", default="none", help="of Convoy's tuning where there is no plan: none, quick or full")
    made.add_argument("--db", type=Path, help="Convoy's performance database")
    made.add_argument("--plans", type=Path, help="folder of Convoy's plans; by default FOLDER/plans")
    made.add_argument("--known", type=Path, help="run file of an earlier call, whose rows are not measured again")
    made.add_argument("--beside", action="store_true", help="jobs that do not need all GPUs run beside each other")
    made.add_argument(
        "--together", type=int, default=1, help="jobs that prepare at once on a GPU; each is timed alone there"
    )
    made.add_argument("--seconds", type=float, default=540.0, help="of the whole call")
    made.add_argument("--timeout-s", type=float, default=300.0, help="of one job")
    made.add_argument("--round-s", type=float, default=0.2)
    made.add_argument("--trust", action="store_true")
    return made


def main() -> None:
    """Measure, or read runs; write the CSV."""
    options = parser().parse_args()
    if not options.runs:
        if options.folder is None:
            raise SystemExit("--folder DIR: where to write the figures")
        options.plans = options.plans or options.folder / "plans"
        options.plans.mkdir(parents=True, exist_ok=True)
        request_of(options, options.nets[0], options.batches[0]).check(
            torch.cuda.device_count() if options.device == "cuda" else os.cpu_count() or 1
        )
        tell(measure(options))
        return
    for path in options.runs:
        run = read(path)
        tell(run)
        print(recorded(run, options.folder).write())


if __name__ == "__main__":
    run_main(main)
