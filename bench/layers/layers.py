"""Single convolutions on one GPU: the best of each of our engines beside cuDNN's best plan and PyTorch, with the roofline.

Usage: python bench/layers/layers.py RUN [RUN ...] [--engines ID ...] [--keep 12] [--jobs 16] [--seconds 400] [--folder DIR]

{RUN_HELP}

Every variant is checked against float64 (integers exactly, normal data by norm) before it is timed; how, stands in
`layer_timing.py`. A row a figure goes to bench/results/layers-DEVICE.csv, its note with the floor: bytes or operations at the
device's own rates, measured in the same run. All variants one by one: `kernels.py`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, which holds the package `bench`

from bench.layers.layer_data import RUN_HELP, Data, Layer, problems, short
from bench.layers.layer_timing import (
    LAUNCHES,
    OURS,
    PEERS,
    ROUNDS,
    Builders,
    Outcome,
    Variant,
    best_by_engine,
    device_facts,
    finals,
    floor_us,
    peers,
    sets_of,
    try_one,
    variants,
    verdict,
)
from bench.shared.command_line import run_main
from bench.shared.record import Recorder

PROVIDERS = {"cudnn": "cudnn.best", "aten": "torch.graph"}
"""Peers' engine ids → names of the providers in results."""


def record(recorder: Recorder, problem: Layer, samples: dict[Variant, list[float]], floor: float) -> None:
    """Write each engine's best."""
    for engine, (median, variant) in best_by_engine(samples).items():
        fifths = statistics.quantiles(samples[variant], n=5)
        recorder.add(
            subject=problem.key, provider=PROVIDERS.get(engine, f"convoy.{engine}"), metric="kernel_us", unit="us",
            p50=median, p20=fifths[0], p80=fifths[3], batch=problem.n, dtype=problem.x_spec.dtype,
            numerics=problem.numerics, note=f"floor {floor:.3g} us {variant.knobs}".strip(),
        )  # fmt: skip


def report(problem: Layer, samples: dict[Variant, list[float]], floor: float, outcomes: list[Outcome]) -> float:
    """Print one layer's line; returns how many times faster than the best peer the best of ours is."""
    best = best_by_engine(samples)
    engine, ours, theirs = verdict(best)
    times = " ".join(f"{PROVIDERS[peer]} {best[peer][0]:7.2f}" for peer in PEERS if peer in best)
    print(
        f"{short(problem):32s} floor {floor:6.2f} {times} ours {ours:7.2f} x{theirs / ours:4.2f} of the floor "
        f"{floor / ours:4.0%} {engine}[{best[engine][1].knobs if engine in best else ''}]",
        flush=True,
    )
    for o in [o for o in outcomes if o.status.startswith(("wrong", "relative"))][:3]:
        print(f"  WRONG {o.variant.engine}[{o.variant.knobs}]: {o.status}", flush=True)
    return theirs / ours


def main() -> None:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").replace("{RUN_HELP}", RUN_HELP),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs="+", metavar="RUN")
    parser.add_argument("--engines", nargs="*", default=OURS)
    parser.add_argument("--keep", type=int, default=12)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seconds", type=float, default=400.0)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    started = time.monotonic()
    target, bytes_per_s, flops, cache_bytes = device_facts()
    every = {run: problems(run) for run in options.runs}
    found = {p: variants(p, options.engines, target, options.keep) for group in every.values() for p in group}
    builders = Builders(options.jobs)
    building = builders.submit([v for group in found.values() for v in group], target)
    torch.backends.cudnn.benchmark = True
    recorder = Recorder(
        "layers", device=target.name, versions=" ".join(f"{name}={value}" for name, value in target.versions),
        protocol=f"graph of {LAUNCHES}, rotating buffers, median of {ROUNDS} replays", folder=options.folder,
    )  # fmt: skip
    means: list[str] = []
    for run, group in every.items():
        torch.backends.cudnn.allow_tf32 = ":strict:" not in run
        ratios: list[float] = []
        for problem in group:
            if time.monotonic() - started > options.seconds:
                print("out of time before", problem.key)
                break
            data = Data.of(problem, sets_of(problem, cache_bytes))
            outcomes = [try_one(v, building[v].result(), data, target) for v in found[problem]]
            outcomes += [try_one(v, "", data, target) for v in peers(problem, target)]
            samples = finals(outcomes, data, target)
            floor = floor_us(problem, bytes_per_s, flops)
            record(recorder, problem, samples, floor)
            ratios.append(report(problem, samples, floor, outcomes))
        good = [ratio for ratio in ratios if ratio > 0]
        if good:
            behind = sum(ratio < 1 for ratio in good)
            means.append(f"{run}: {statistics.geometric_mean(good):.2f} over {len(good)} layers, {behind} behind")
        recorder.write()  # a run that is cut off keeps those before it
    builders.close()
    print("geometric means over the best peer:", *means, f"{time.monotonic() - started:.0f} s", sep="\n  ")


if __name__ == "__main__":
    run_main(main)
