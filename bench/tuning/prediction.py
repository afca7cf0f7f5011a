"""How good is a choice that was only predicted? Question `prediction`, metric `fraction_of_best`.

Every layer in a database of measurements is left out in turn (in every memory format, dtype and epilogue), its candidates'
times are predicted from all others, and the one predicted to be the fastest is looked up among those that were measured.
A figure is the best measured time over the time of that one; `convoy.aten` is PyTorch's own choice. No device is needed.

    python bench/tuning/prediction.py [--db perf.db] [--target DIGEST]

Without a database the results that the package ships are asked: what effort `none` knows on a new machine. `--target` names one
of several targets; by default the one with the most rows. A layer that is like no other is left to PyTorch.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections import defaultdict
from pathlib import Path

from convoy.engines.manifest import BASELINE
from convoy.perfdb import Measurement
from convoy.problem import ConvProblem, EngineConfig, LinearProblem, Problem, parse_problem
from convoy.problem.layer_coordinates import kind_of
from convoy.tune.predict import MIN_SAMPLES, TimePredictor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, which holds the package `bench`

from bench.shared.command_line import run_main
from bench.shared.record import Recorder
from bench.tuning.known_rows import measurements

LEAST_CANDIDATES = 6
"""Layers with fewer measured candidates leave nothing to choose."""


def layers(rows: list[Measurement]) -> list[tuple[ConvProblem | LinearProblem, dict[EngineConfig, float]]]:
    """Each layer with the measured time of its candidates."""
    found: dict[str, dict[EngineConfig, float]] = defaultdict(dict)
    for row in rows:
        if row.ok and row.samples >= MIN_SAMPLES and not row.problem.startswith("subgraph:"):
            found[row.problem][row.config] = row.median_us
    asked = {key: times for key, times in found.items() if len(times) >= LEAST_CANDIDATES and _has_baseline(times)}
    parsed: list[tuple[Problem, dict[EngineConfig, float]]] = [(parse_problem(k, ""), t) for k, t in asked.items()]
    return [(p, t) for p, t in parsed if kind_of(p) is not None]  # type: ignore[misc]


def _has_baseline(times: dict[EngineConfig, float]) -> bool:
    """Of a layer that is like no other only PyTorch's own time is predicted."""
    return any(config.engine == BASELINE for config in times)


def fraction(experience: TimePredictor, problem: Problem, times: dict[EngineConfig, float]) -> float:
    """The best measured time over that of the candidate predicted to be the fastest."""
    space: dict[str, list[EngineConfig]] = defaultdict(list)
    for config in times:
        space[config.engine].append(config)
    predicted = experience.without(problem).predict(problem, space)
    return min(times.values()) / times[min(predicted, key=predicted.__getitem__)]


def main() -> None:
    """Leave out, predict, compare; print a short table, write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--db", type=Path)
    parser.add_argument("--target", default="", metavar="DIGEST")
    options = parser.parse_args()
    target, found = measurements(options.db, options.target)
    rows = [row for row in found if row.ok]
    experience = TimePredictor.from_rows(rows)
    recorder = Recorder(
        "prediction",
        device=target.name,
        versions=rows[0].versions,
        protocol=f"{rows[0].protocol}, leave one layer out, {experience.measurements} measurements",
    )
    fractions: list[float] = []
    for problem, times in layers(rows):
        fractions.append(fraction(experience, problem, times))
        best = min(times.values())
        stock = min((t for config, t in times.items() if config.engine == BASELINE), default=math.nan)
        dtype, numerics = problem.x_spec.dtype, problem.numerics
        for provider, value in (("convoy", fractions[-1]), ("convoy.aten", best / stock)):
            recorder.add(
                subject=problem.key,
                batch=problem.n,
                dtype=dtype,
                numerics=numerics,
                provider=provider,
                metric="fraction_of_best",
                unit="1",
                p50=value,
            )
    within = {limit: sum(f >= limit for f in fractions) / len(fractions) for limit in (0.95, 0.9)}
    print(f"{len(fractions)} layers left out one by one, {target.name}")
    print(f"geometric mean of the best measured speed that the predicted choice reaches: {mean(fractions):.3f}")
    print(f"within 5 %: {within[0.95]:.0%}, within 10 %: {within[0.9]:.0%}, median {statistics.median(fractions):.3f}")
    print(recorder.write())


def mean(values: list[float]) -> float:
    """Geometric mean."""
    return math.exp(sum(map(math.log, values)) / len(values))


if __name__ == "__main__":
    run_main(main)
