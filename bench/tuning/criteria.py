"""How good are the criteria on layers that they were not learned from? Question `criteria`, by replay: no device is needed.

Every measured layer is left out once, in every batch, memory format, dtype and epilogue: with a twelfth of all layers at a time
(`layers left out`), and with all layers of its net (`nets left out`, the harder test: a net's layers are like each other). From
the rest are learned the criteria, and what effort `none` predicts from. Memory formats that a search does not look at are not
asked, nor layers whose search was cut short, of which the best is not known (`Measured.is_asked`). Each says which engine it
would take, of those that were measured on the layer; a figure is the best engine's time over that engine's, each with its own
best knobs.

    convoy.criteria      the decision table alone; PyTorch's own choice where it does not cover the layer
    convoy.neighbours    prediction from neighbours alone
    convoy.models        the same, and cost models of engines that were never measured on anything like the layer
    convoy               all three: what effort `none` does
    convoy.aten          PyTorch's own choice

`convoy.config` is `convoy` with the knobs that it predicts, and not the engine's best. A row a layer where layers are left out
(of `convoy` and `convoy.criteria`), shares by net (`within_5`, `within_10`) for both tests.

    python bench/tuning/criteria.py [--db perf.db] [--target DIGEST] [--learn FOLDER]

Without a database the results that the package ships are asked. `--target` names one of several targets; by default the one with
the most rows. `--learn` writes the criteria that are learned from all layers, in the form that ships with the package.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import random
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from convoy.compare.runs.manifest import commit
from convoy.compare.study.learn_criteria import CriteriaCheck, MeasuredLayer, known_layers, learn, sizes_of
from convoy.engines.base import Engine
from convoy.engines.competition import competing_engines
from convoy.engines.manifest import BASELINE, MANIFEST, load_engine
from convoy.perfdb import Measurement
from convoy.problem import ConvProblem, EngineConfig
from convoy.settings import Settings
from convoy.target import Target
from convoy.tune.criteria import Criteria, leaves, rules
from convoy.tune.criteria_file import SUFFIX, criteria_json
from convoy.tune.predict import MIN_SAMPLES, CostModel, TimePredictor
from convoy.tune.prior_rows import cost_models
from convoy.tune.search_space import SearchSpace
from convoy.tune.tuning_task import TuningTask

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, which holds the package `bench`

from bench.layers.make_layers import COLUMNS as SIZES
from bench.shared.command_line import run_main
from bench.shared.record import Recorder
from bench.tuning.known_rows import measurements

FOLDER = Path(__file__).parents[1] / "layers"
PARTS = 12
SEED = 0
PROVIDERS = ("convoy.aten", "convoy.neighbours", "convoy.models", "convoy.criteria", "convoy", "convoy.config")

LEAST_LAYERS = 50
"""Layers of one batch size from which a share of them means something."""

KEPT = ("convoy.criteria", "convoy")
"""Those that a row a layer is kept of; of the others the shares say enough."""


def nets() -> dict[str, set[str]]:
    """The sizes of each net's layers."""
    found: dict[str, set[str]] = {}
    for path in sorted(FOLDER.glob("*.csv")):
        with path.open() as file:
            rows = [{name: int(row[name]) for name in SIZES} for row in csv.DictReader(file)]
        found[path.stem] = {sizes_of(ConvProblem(**row)) for row in rows}
    del found["targets"]
    return found


def parts(layers: Sequence[MeasuredLayer]) -> list[set[str]]:
    """All sizes in twelve parts, drawn by a seed."""
    sizes = sorted({sizes_of(layer.problem) for layer in layers})
    random.Random(SEED).shuffle(sizes)
    return [set(sizes[index::PARTS]) for index in range(PARTS)]


@dataclass(frozen=True)
class Measured:
    """All rows of a target, by layer."""

    target: Target
    rows: list[Measurement]
    layers: list[MeasuredLayer]
    times: dict[str, dict[EngineConfig, float]]
    model: CostModel
    searched: set[str]

    @staticmethod
    def of(target: Target, rows: Sequence[Measurement]) -> Measured:
        """Arrange rows."""
        times: dict[str, dict[EngineConfig, float]] = defaultdict(dict)
        rows_of: dict[str, list[Measurement]] = defaultdict(list)
        for row in rows:
            rows_of[row.problem].append(row)
            if row.ok and row.samples >= MIN_SAMPLES:
                times[row.problem][row.config] = row.median_us
        engines = [load_engine(name) for name in sorted({row.config.engine for row in rows} & MANIFEST.keys())]
        layers = known_layers(rows)
        able = [load_engine(name) for name in competing_engines(Settings())]
        able = [engine for engine in able if engine.family != "reference"]
        searched = {
            layer.problem.key for layer in layers if _is_searched(layer, rows_of[layer.problem.key], able, target)
        }
        return Measured(target, list(rows), layers, times, cost_models(engines, target), searched)

    def is_asked(self, layer: MeasuredLayer) -> bool:
        """Whether a search has a choice there.

        Forward convolutions on tensor cores that stand in nhwc too are not looked at in nchw
        (`convoy.pipeline.search_pruning.nchw_duplicates`): of an H100's none was faster there.
        """
        problem = layer.problem
        twin = isinstance(problem, ConvProblem) and problem.layout == "nchw" and problem.numerics != "strict"
        unseen = twin and problem.with_layout("nhwc").key in self.times
        return layer.is_choice() and problem.key in self.searched and not unseen

    def without(self, sizes: set[str]) -> list[Measurement]:
        """The rows of all other layers."""
        gone = {layer.problem.key for layer in self.layers if sizes_of(layer.problem) in sizes}
        return [row for row in self.rows if row.problem not in gone]


def _is_searched(layer: MeasuredLayer, rows: Sequence[Measurement], engines: Sequence[Engine], target: Target) -> bool:
    """Whether the engines with a cost model had their turn: what was cut short before has a best that means nothing."""
    task = TuningTask(SearchSpace(layer.problem, engines, target))
    task.take_known(rows)
    return task.is_known()


def fractions(measured: Measured, layer: MeasuredLayer, known: TimePredictor, criteria: Criteria) -> dict[str, float]:
    """By provider, the best time over that of what it takes."""
    problem, times = layer.problem, measured.times[layer.problem.key]
    space: dict[str, list[EngineConfig]] = defaultdict(list)
    for config in times:
        space[config.engine].append(config)
    versions = {engine: configs[0].version for engine, configs in space.items()}

    def estimate(config: EngineConfig) -> float | None:
        return load_engine(config.engine).estimate_us(problem, config.knobs, measured.target)

    regrets = criteria.regrets(problem, versions)
    predicted = {
        "convoy.neighbours": known.predict(problem, space),
        "convoy.models": known.predict_with(problem, space, estimate=estimate),
        "convoy": known.predict_with(problem, space, regrets=regrets, estimate=estimate),
    }
    picks = {name: min(found, key=found.__getitem__) for name, found in predicted.items()}
    ranked = criteria.ranking(problem, versions)
    engines = {name: config.engine for name, config in picks.items()}
    engines |= {"convoy.aten": BASELINE, "convoy.criteria": ranked[0] if ranked else BASELINE}
    found = {
        name: layer.least_us / layer.best_us[engine] for name, engine in engines.items() if engine in layer.best_us
    }
    return found | {"convoy.config": layer.least_us / times[picks["convoy"]]}


def left_out(measured: Measured, sizes: set[str]) -> Iterator[tuple[MeasuredLayer, dict[str, float]]]:
    """Layers of these sizes, each with what is picked by those who know all others."""
    rows = measured.without(sizes)
    if not rows:
        return
    known = TimePredictor.from_rows(rows, measured.model)
    criteria = learn(rows, measured.target, protocol=rows[0].protocol)
    for layer in measured.layers:
        if sizes_of(layer.problem) in sizes and measured.is_asked(layer):
            yield layer, fractions(measured, layer, known, criteria)


def shares(recorder: Recorder, subject: str, found: Sequence[dict[str, float]], note: str) -> None:
    """Write how often each provider comes near the best, and print it."""
    print(f"{subject}: {len(found)} layers")
    for provider in PROVIDERS:
        own = CriteriaCheck.of([f[provider] for f in found if provider in f])
        print(f"  {provider:18} {own}")
        for metric, value in (("within_5", own.within_5), ("within_10", own.within_10), ("mean_fraction", own.mean)):
            said = f"{note}, {own.layers} layers"
            recorder.add(subject=subject, provider=provider, metric=metric, unit="1", p50=value, note=said)


def by_layers(measured: Measured, recorder: Recorder) -> None:
    """A twelfth of all layers left out at a time."""
    found = list(itertools.chain.from_iterable(left_out(measured, sizes) for sizes in parts(measured.layers)))
    for layer, own in found:
        problem: Any = layer.problem
        for provider in KEPT:
            if provider in own:
                recorder.add(
                    subject=problem.key, provider=provider, metric="fraction_of_best", unit="1", batch=problem.n,
                    dtype=problem.x_spec.dtype, numerics=problem.numerics, p50=own[provider],
                )  # fmt: skip
    shares(recorder, "layers left out", [own for _, own in found], "a twelfth of the layers at a time")
    for batch in sorted({layer.problem.n for layer, _ in found}):
        own = [own for layer, own in found if layer.problem.n == batch]
        if len(own) < LEAST_LAYERS:
            continue
        shares(recorder, f"layers left out, batch {batch}", own, "those of one batch")


def by_nets(measured: Measured, recorder: Recorder) -> None:
    """A net left out at a time."""
    every: list[dict[str, float]] = []
    for net, sizes in nets().items():
        found = [own for _, own in left_out(measured, sizes)]
        if found:
            shares(recorder, net, found, "the net's layers left out")
        every += found
    shares(recorder, "nets left out", every, "all nets, each in its turn; a layer of two nets counts twice")


def main() -> None:
    """Leave out, learn, compare; print shares, write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--db", type=Path)
    parser.add_argument("--learn", type=Path, metavar="FOLDER")
    parser.add_argument("--target", default="", metavar="DIGEST")
    options = parser.parse_args()
    target, rows = measurements(options.db, options.target)
    protocol = rows[0].protocol
    criteria = learn(rows, target, protocol=protocol, commit=commit())
    print("\n".join(rules(criteria)), f"\n{len(leaves(criteria.root))} leaves, {criteria.problems} layers\n")
    if options.learn:
        path = options.learn / f"{target.digest}{SUFFIX}"
        path.write_text(criteria_json(criteria), encoding="utf-8")
        print(path)
    measured = Measured.of(target, rows)
    recorder = Recorder(
        "criteria",
        device=target.name,
        versions=next((row.versions for row in rows if row.versions), ""),
        protocol=f"{protocol}, replay of {len(rows)} rows, seed {SEED}",
    )
    by_layers(measured, recorder)
    by_nets(measured, recorder)
    print(recorder.write())


if __name__ == "__main__":
    run_main(main)
