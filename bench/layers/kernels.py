"""Every variant of our kernels on given layers, checked and timed, beside cuDNN's plans and PyTorch: what to keep, what to drop.

Usage: python bench/layers/kernels.py RUN [RUN ...] --out FILE.csv [--resume FILE.csv ...] [--seconds 540]
                                      [--engines ID ...] [--keep 24]
                               [--jobs 16] [--peers all|aten|none]

{RUN_HELP}

A row a variant goes to FILE.csv as soon as it is known: its time (µs), the cost model's guess, its error, or why it has none. Two
stages: `quick` rows are one short timing each; `final` rows are the best two of each engine timed in turn. When the time is
up the script stops in order; given its file by `--resume`, a later run leaves out what is there: layers that have final rows,
and single quick rows of the layer that was cut off. Layers that none of the engines takes are left out. One line a layer says
who won.
"""

from __future__ import annotations

import argparse
import csv
import math
import os
import statistics
import sys
import time
from collections.abc import Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Late
from dataclasses import dataclass, field
from pathlib import Path

import torch

from convoy.problem import Knobs, parse_problem
from convoy.target import Target

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, which holds the package `bench`

from bench.layers.layer_data import RUN_HELP, Data, Layer, problems, short
from bench.layers.layer_timing import (
    HOPELESS_US,
    OURS,
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

COLUMNS = ("problem", "engine", "knobs", "stage", "status", "us", "floor_us", "guess_us", "error", "device")
RESERVE_S = 5.0
"""Seconds kept back for the last layer's finals."""


@dataclass
class Sheet:
    """The file of all variants: rows are on disk as soon as they are known."""

    path: Path
    device: str
    done: set[str] = field(default_factory=set)
    quick: dict[Variant, Outcome] = field(default_factory=dict)

    def begin(self, earlier: Iterable[Path]) -> None:
        """Write the heading and the rows of earlier files of the same device, and learn what they hold."""
        rows: dict[tuple[str, ...], dict[str, str]] = {}
        for path in earlier:
            with path.open(newline="", encoding="utf-8") as file:
                for row in csv.DictReader(file):
                    if row["device"] == self.device:
                        rows[row["problem"], row["engine"], row["knobs"], row["stage"]] = row
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows.values())
        for row in rows.values():
            self._learn(row)

    def _learn(self, row: dict[str, str]) -> None:
        if row["stage"] == "final":
            self.done.add(row["problem"])
            return
        problem = parse_problem(row["problem"])
        variant = Variant(problem, row["engine"], Knobs.parse(row["knobs"]))  # type: ignore[arg-type]
        self.quick[variant] = Outcome(
            variant, row["status"], float(row["us"]), float(row["error"]), float(row["guess_us"])
        )

    def add(self, outcome: Outcome, stage: str, floor: float) -> None:
        """Append one row."""
        v = outcome.variant
        figures = (f"{value:.4g}" for value in (outcome.us, floor, outcome.guess, outcome.error))
        with self.path.open("a", newline="", encoding="utf-8") as file:
            row = (v.problem.key, v.engine, str(v.knobs), stage, outcome.status, *figures, self.device)
            csv.writer(file, lineterminator="\n").writerow(row)


@dataclass
class Clock:
    """The time that is left."""

    end: float

    @property
    def left(self) -> float:
        """Seconds."""
        return self.end - time.monotonic()


def measure(
    problem: Layer,
    found: list[Variant],
    building: dict[Variant, Future[str]],
    *,
    sheet: Sheet,
    clock: Clock,
    target: Target,
    floor: float,
    data: Data,
    peer_kinds: tuple[str, ...],
) -> list[Outcome] | None:
    """Quick outcomes of all variants and peers; None where the time ended before."""  # fmt: skip
    outcomes: list[Outcome] = []
    for variant in [*found, *(v for v in peers(problem, target) if v.engine in peer_kinds)]:
        if variant in sheet.quick:
            outcomes.append(sheet.quick[variant])
            continue
        try:
            future = building.get(variant)
            refused = future.result(timeout=max(0.0, clock.left - RESERVE_S)) if future else ""
        except Late:
            return None
        if clock.left < RESERVE_S:
            return None
        best = min((o.us for o in outcomes if o.status == "ok"), default=HOPELESS_US)
        outcome = try_one(variant, refused, data, target, max(1000.0, min(HOPELESS_US, 6 * best)))
        sheet.add(outcome, "quick", floor)
        outcomes.append(outcome)
    return outcomes


def line(
    problem: Layer, samples: dict[Variant, list[float]], floor: float, outcomes: list[Outcome]
) -> tuple[str, float]:
    """What to say of a layer, and the gain over the best peer."""
    best = best_by_engine(samples)
    engine, ours, theirs = verdict(best)
    figures = " ".join(f"{name} {us:.2f}" for name, (us, _) in sorted(best.items(), key=lambda item: item[1][0]))
    winner = f"{engine}[{best[engine][1].knobs}]" if engine in best else "none of ours"
    wrong = [o for o in outcomes if o.status.startswith(("wrong", "relative"))]
    words = f"{short(problem):32s} floor {floor:6.2f} | {figures} | x{theirs / ours:.2f} {winner}"
    return words + "".join(
        f"\n  WRONG {o.variant.engine}[{o.variant.knobs}]: {o.status}" for o in wrong[:4]
    ), theirs / ours


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").replace("{RUN_HELP}", RUN_HELP),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs="+", metavar="RUN")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", type=Path, nargs="*", default=[])
    parser.add_argument("--engines", nargs="*", default=OURS)
    parser.add_argument("--keep", type=int, default=24)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seconds", type=float, default=540.0)
    parser.add_argument("--peers", choices=("all", "aten", "none"), default="all")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    clock = Clock(time.monotonic() + options.seconds)
    target, bytes_per_s, flops, cache_bytes = device_facts()
    print(f"{target.name}: {bytes_per_s / 1e12:.2f} TB/s,", *(f"{n} {r / 1e12:.0f} TFLOP/s" for n, r in flops.items()))
    sheet = Sheet(options.out, target.name)
    sheet.begin([path for path in options.resume if path.exists()])
    every = {run: [p for p in problems(run) if p.key not in sheet.done] for run in options.runs}
    found = {p: variants(p, options.engines, target, options.keep) for group in every.values() for p in group}
    every = {run: [p for p in group if found[p]] for run, group in every.items()}
    builders = Builders(options.jobs)
    wanted = [v for group in found.values() for v in group if v not in sheet.quick]
    building = builders.submit(wanted, target)
    print(f"{len(found)} layers, {len(wanted)} variants to build; {len(sheet.done)} layers are done", flush=True)
    torch.backends.cudnn.benchmark = True
    kinds = {"all": ("cudnn", "aten"), "aten": ("aten",), "none": ()}[options.peers]
    means: list[str] = []
    for run, group in every.items():
        torch.backends.cudnn.allow_tf32 = ":strict:" not in run
        gains: list[float] = []
        for problem in group:
            if clock.left < RESERVE_S:
                print("out of time before", problem.key)
                break
            data = Data.of(problem, sets_of(problem, cache_bytes))
            floor = floor_us(problem, bytes_per_s, flops)
            outcomes = measure(
                problem, found[problem], building, sheet=sheet, clock=clock, target=target, floor=floor, data=data,
                peer_kinds=kinds,
            )  # fmt: skip
            if outcomes is None:
                print("out of time in", problem.key)
                break
            samples = finals(outcomes, data, target)
            for variant, values in samples.items():
                sheet.add(Outcome(variant, "ok", statistics.median(values)), "final", floor)
            words, gain = line(problem, samples, floor, outcomes)
            print(words, flush=True)
            gains.append(gain)
        good = [gain for gain in gains if not math.isnan(gain)]
        if good:
            behind = sum(gain < 1 for gain in good)
            means.append(f"{run}: {statistics.geometric_mean(good):.3f}x over {len(good)} layers, {behind} behind")
    builders.close()
    print("geometric means over the best peer:", *means, sep="\n  ")


if __name__ == "__main__":
    run_main(main)
