"""How long does choosing for a whole net take? Question `selection`, metrics `solve_s` and `solve_budget_s`.

The net is DenseNet-201, captured with random weights: over 600 nodes, with regions that overlap. Every problem of every
region, one for each of two memory formats, is given 4 candidates with times, workspaces and packed weights drawn from a seed
(nothing is measured), which makes 8 for a region, and every value a price of conversion. `exact` solves it as it is, then
under a memory budget of three quarters of what the fastest choice wants. A figure is the median over the seeds.

    python bench/tuning/selection.py [--seeds 5] [--candidates 4]
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

import torch

from convoy.capture import capture_inference
from convoy.graph.ir import Graph
from convoy.measurement import detect_target
from convoy.perfdb import Measurement, Status
from convoy.pipeline.selection_input import distinct_problems, layout_problems, selection_problem
from convoy.problem import EngineConfig, Knobs, LayoutProblem, Problem
from convoy.regions import propose
from convoy.selection import Selection, SelectionProblem, solve
from convoy.zoo.torchvision_import import import_torchvision

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, which holds the package `bench`

from bench.shared.command_line import run_main
from bench.shared.record import Recorder

LAYOUTS = ("nchw", "nhwc")
ENGINES = ("aten", "onednn", "gemm", "winograd2", "fft")
FLOPS_PER_US, BYTES_PER_US, LAUNCH_US = 1e5, 1e4, 3.0
"""A device of 100 GFLOP/s and 10 GB/s, about one core of a server: what times are drawn around."""


def densenet201(size: int = 224) -> Graph:
    """The graph of torchvision's DenseNet-201 with random weights, at batch 1."""
    net = import_torchvision().models.densenet201(weights=None).eval()
    return capture_inference(net, (torch.zeros(1, 3, size, size),)).graph


def drawn_rows(problem: Problem, rng: random.Random, candidates: int) -> list[Measurement]:
    """Candidates with times round the problem's roofline, `aten` first; the faster they are, the more memory they may want."""
    floor_us = LAUNCH_US + max(problem.flops / FLOPS_PER_US, problem.bytes_min / BYTES_PER_US)
    favoured = 1.5 if rng.random() < 0.5 else 1.0  # a layer may be at home in one format or the other
    rows: list[Measurement] = []
    for index in range(1 if isinstance(problem, LayoutProblem) else candidates):
        engine = ENGINES[0] if index == 0 else rng.choice(ENGINES[1:])
        ratio = rng.lognormvariate(0.7, 0.4) * (favoured if getattr(problem, "layout", "") == "nhwc" else 1.0)
        wants_memory = index > 0 and rng.random() < 0.5
        rows.append(
            Measurement(
                problem=problem.key,
                config=EngineConfig(engine, 1, Knobs.of(variant=index)),
                target="synthetic",
                protocol="synthetic",
                status=Status.OK,
                samples=9,
                median_us=floor_us * ratio,
                spread_us=0.01 * floor_us * ratio,
                workspace_bytes=rng.randrange(16 << 20) if wants_memory else 0,
                resident_bytes=rng.randrange(1 << 20) if wants_memory else 0,
            )
        )
    return rows


def drawn_problem(graph: Graph, seed: int, candidates: int = 4) -> SelectionProblem:
    """The selection problem of a graph with drawn times."""
    rng = random.Random(seed)
    regions = propose(graph, layouts=LAYOUTS, numerics="strict")
    copies = layout_problems(graph, LAYOUTS)
    rows: Mapping[str, list[Measurement]] = {
        problem.key: drawn_rows(problem, rng, candidates) for problem in distinct_problems(regions, copies)
    }
    border = {name: LAYOUTS[0] for name in (*graph.inputs, *graph.outputs) if len(graph.values[name].spec.shape) == 4}
    return selection_problem(graph, regions, copies, rows, layouts=LAYOUTS, border=border)


@dataclass(frozen=True)
class Solved:
    """One problem, solved."""

    problem: SelectionProblem
    selection: Selection
    seconds: float


def solved(problem: SelectionProblem) -> Solved:
    """Solve to the optimum, by the clock."""
    start = time.perf_counter()
    selection = solve(problem, "exact")
    return Solved(problem, selection, time.perf_counter() - start)


def under_budget(free: Solved) -> Solved:
    """The same problem with less memory than its fastest choice wants."""
    return solved(replace(free.problem, memory_budget_bytes=free.selection.peak_bytes * 3 // 4))


def record(recorder: Recorder, metric: str, found: list[Solved]) -> str:
    """Write the figure of several seeds; returns a line for people."""
    seconds = sorted(s.seconds for s in found)
    problem = found[0].problem
    gap = max(s.selection.gap for s in found)
    greedy = statistics.median(solve(s.problem, "greedy").total_us / s.selection.total_us for s in found)
    note = (
        f"nodes={len(problem.nodes)} regions={len(problem.regions)} candidates={len(problem.candidates)} "
        f"gap={gap:.1e} greedy_over_exact={greedy:.3f} slowest_s={seconds[-1]:.2f}"
    )
    cuts = statistics.quantiles(seconds, n=5, method="inclusive") if len(seconds) > 1 else seconds * 4
    recorder.add(
        subject="densenet201", provider="convoy", metric=metric, unit="s", numerics="strict",
        p50=statistics.median(seconds), p20=cuts[0], p80=cuts[3], ok=gap == 0.0, note=note,
    )  # fmt: skip
    return f"{metric:16} {statistics.median(seconds):6.2f} s  {note}"


def main() -> None:
    """Solve, print a short table, write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--candidates", type=int, default=4)
    options = parser.parse_args()
    recorder = Recorder(
        "selection",
        device=detect_target("cpu").name,
        versions=f"highspy={version('highspy')} torch={torch.__version__}",
        protocol=f"seeds={options.seeds} candidates={options.candidates} a problem, times drawn, one thread",
    )
    graph = densenet201()
    free = [solved(drawn_problem(graph, seed, options.candidates)) for seed in range(options.seeds)]
    lines = [record(recorder, "solve_s", free)]
    lines.append(record(recorder, "solve_budget_s", [under_budget(s) for s in free]))
    print("\n".join(lines))
    print(recorder.write())


if __name__ == "__main__":
    run_main(main)
