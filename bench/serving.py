"""Which load does a package bear, and how long do its queries wait? Question `serving`: `convoy bench`, a fresh process each.

- `single_stream_p90_ms`: 90th percentile of one sample at a time.
- `offline_per_s`: samples a second by the best batch size.
- `server_p99_ms`: 99th percentile of the latency where samples arrive at random at 70 % of the offline throughput.
- `p99_over_batch`: the same over the time of the largest batch.
- `allowed_per_s`: the highest load that was found to keep the 99th percentile within three times the largest batch's time.

    python bench/serving.py [--device cpu] [--nets resnet50] [--batches 1,2,4,8,16,32] [--dtype fp32] [--seeds 3] [--seconds 30]

A net is exported by `convoy export --portable`, tuned for `--tune-seconds` in all. Each seed is another schedule of arrivals; a
figure is the median of the seeds, with the extremes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the repository, which holds the package `bench`

from bench.shared.command_line import counts, run_main
from bench.shared.record import Recorder
from bench.shared.rows import Row

from convoy.target import usable_cores

UNITS = {
    "single_stream_p90_ms": "ms", "offline_per_s": "1/s", "server_p99_ms": "ms", "p99_over_batch": "1",
    "allowed_per_s": "1/s",
}  # fmt: skip
"""Metric → unit."""


HEADS = (
    "net",
    "dtype",
    "largest batch",
    "single stream, 90th percentile, ms",
    "offline, samples/s",
    "at 70 % of it, 99th percentile, ms",
    "over the largest batch's time",
    "load within 3 times that time, samples/s",
)
"""Of the table."""


def convoy(*words: object) -> str:
    """Run a command of Convoy in a fresh process; its standard output."""
    command = [sys.executable, "-m", "convoy", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"convoy {' '.join(command[3:])}: {done.stderr}")
    return done.stdout


def exported(net: str, folder: Path, options: argparse.Namespace) -> Path:
    """The package of a net with random weights, with a program for each batch size."""
    package, sizes = folder / "net.convoy", ",".join(map(str, options.batches))
    kind = ("--device", options.device, "--dtype", options.dtype, "--portable")
    convoy("export", net, "-o", package, "--batches", sizes, "--time", options.tune_seconds, *kind)
    return package


def figures_of(found: dict[str, Any]) -> dict[str, float]:
    """Metric → value, from the JSON of `convoy bench`; `allowed_per_s` is 0 where no load kept the bound."""
    return {
        "single_stream_p90_ms": found["single_stream"]["p90_ms"],
        "offline_per_s": found["offline_samples_per_s"],
        "server_p99_ms": found["server"]["latencies"]["p99_ms"],
        "p99_over_batch": found["batch_multiple"],
        "allowed_per_s": found["allowed"]["rate"] if found["allowed"] else 0.0,
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and extremes of few values, as a recorder takes them."""
    ordered = sorted(values)
    return {"p50": ordered[len(ordered) // 2], "p20": ordered[0], "p80": ordered[-1]}


def add_net(recorder: Recorder, net: str, runs: Sequence[dict[str, Any]], dtype: str) -> None:
    """Record and print a net's figures.

    Args:
        recorder: takes them.
        net: its name.
        runs: what `convoy bench` told, by seed.
        dtype: of the net.
    """
    queries = min(run["server"]["latencies"]["queries"] for run in runs)
    note = f"{queries} queries or more a schedule; load {os.getloadavg()[0]:.1f} on {usable_cores()} cores"
    about: dict[str, Any] = {"subject": net, "provider": "convoy", "dtype": dtype, "note": note, "processes": "own"}
    about["batch"] = runs[0]["batches"][-1]["batch"]
    found = [figures_of(run) for run in runs]
    for metric, unit in UNITS.items():
        figures = spread([one[metric] for one in found])
        recorder.add(metric=metric, unit=unit, **about, **figures)
        print(f"{net:16} {metric:22} {figures['p50']:10.3f} {unit}   {note}", flush=True)


def serving_table(rows: Sequence[Row], title: str) -> str:
    """Latencies, throughput, and the load that the bound allows."""
    nets: dict[tuple[str, str, str], dict[str, float]] = {}
    for row in rows:
        nets.setdefault((row["subject"], row["dtype"], row["batch"]), {})[row["metric"]] = float(row["p50"])
    lines = [
        f"{title}, {rows[0]['device']}, commit {rows[0]['commit']}, {rows[0]['protocol']}",
        "",
        f"| {' | '.join(HEADS)} |",
        f"|{'---|' * len(HEADS)}",
    ]
    for key, found in nets.items():
        forms = (".2f", ".0f", ".2f", ".2f", ".0f")
        cells = [f"{found[name]:{form}}" if name in found else "" for name, form in zip(UNITS, forms, strict=True)]
        lines.append(f"| {' | '.join((*key, *cells))} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nets", default="resnet50")
    parser.add_argument("--batches", type=counts, default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="fp32", choices=("fp32", "fp16", "bf16"))
    parser.add_argument("--seeds", type=int, default=3, help="schedules of arrivals")
    parser.add_argument("--seconds", type=float, default=30.0, help="for all scenarios of one schedule")
    parser.add_argument("--tune-seconds", type=float, default=180.0, help="for the export, with all batch sizes")
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    from convoy.compare.runs.manifest import host
    from convoy.measurement import detect_target

    target = detect_target(options.device)
    recorder = Recorder(
        "serving",
        device=target.name,
        versions=" ".join(f"{key}={value}" for key, value in target.versions if key == "torch"),
        protocol=f"{options.seeds} schedules of arrivals, {options.seconds:g} s each, {usable_cores()} cores",
        folder=options.folder,
        machine={"host": host()},
    )
    with tempfile.TemporaryDirectory() as folder:
        for net in options.nets.split(","):
            package = exported(net, Path(folder), options)
            bench = ("bench", package, "--trust", "--json", "--seconds", options.seconds)
            runs = [json.loads(convoy(*bench, "--seed", seed)) for seed in range(options.seeds)]
            add_net(recorder, net, runs, options.dtype)
            print(recorder.write())  # after each net: a run that is cut short keeps its rows


if __name__ == "__main__":
    run_main(main)
