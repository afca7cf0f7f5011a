"""Predict times from what was measured on other problems: effort `none`, which may measure nothing.

Nearest neighbours: what a config took on problems of the same kind, as a ratio to its engine's cost model, or to a roofline
fitted to all measurements where it has none, is taken over, the nearer the problem the more: the model knows of tiles and of
waves, the neighbours how far it is off. A layer's kind is what decides which code runs (filter, stride, dilation, groups,
memory format, dtype); distance is in the sizes of its implicit GEMM, in powers of two. Where an engine was never measured on
such a layer its cost model speaks, and the criteria (`convoy.tune.criteria`) have their say on every engine. How well
this picks is measured by `bench/tuning/prediction.py` and `bench/tuning/criteria.py`: on layers that are left out, against the
best that was measured on them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Final

from convoy.engines.manifest import BASELINE
from convoy.errors import InputError
from convoy.perfdb.row import Measurement, Status
from convoy.problem import (
    ConvProblem,
    EngineConfig,
    LinearProblem,
    Problem,
    SubgraphProblem,
    is_subgraph_key,
    parse_problem,
)
from convoy.tune.fitted_roofline import Roofline, fit_roofline
from convoy.tune.problem_distance import (
    LAYERS,
    LayerCoordinates,
    LayerKind,
    coordinates_of,
    distance,
    kind_of,
    sizes_key,
)

MAX_DISTANCE: Final = 8.0
"""Powers of two, all sizes together, from which a neighbour says nothing more."""

MAX_NEIGHBOURS: Final = 6
"""Neighbours of a config that count, the nearest."""

MIN_SAMPLES: Final = 2
"""A row of one sample was pruned after its first run, which on a GPU holds the launch itself."""

ATEN_PASSES: Final = 2.0
"""Passes that ATen is taken to need for an operator that the compiler may do better: of 168 such pieces on an H200 (poolings,
batch norms and their gradients) ATen was faster on 9; the median of an operator was 1.1 to 8.8 times the compiler's time."""

CostModel = Callable[[Problem, EngineConfig], float | None]
"""An engine's cost model, microseconds; None where it has none."""


def no_cost_model(problem: Problem, config: EngineConfig) -> float | None:
    """Where no engine has a cost model."""
    del problem, config


@dataclass(slots=True)
class _Sample:
    """One measurement of a config: on traits, so many times the roofline, and so many times the cost model, if there is one."""

    problem: str
    traits: LayerCoordinates
    log_ratio: float
    log_model: float | None = None


@dataclass(slots=True)
class TimePredictor:
    """What is known of a device, arranged for prediction.

    Attributes:
        roofline: fitted to all rows.
        seen: by kind and config.
        measurements: how many rows it rests on.
        unsteady: configs that gave other bits from run to run on some problem of a kind.
        model: the engines' cost models.
        fusing: ids of the engines that compute a subgraph in one pass (`Engine.fuses_subgraphs`).
    """

    roofline: Roofline
    seen: dict[LayerKind, dict[EngineConfig, list[_Sample]]] = field(
        default_factory=dict[LayerKind, dict[EngineConfig, list[_Sample]]]
    )
    measurements: int = 0
    unsteady: set[tuple[LayerKind | None, EngineConfig]] = field(
        default_factory=set[tuple[LayerKind | None, EngineConfig]]
    )
    model: CostModel = field(default=no_cost_model, compare=False)
    fusing: frozenset[str] = frozenset()

    @staticmethod
    def of(
        rows: Iterable[Measurement], model: CostModel = no_cost_model, fusing: Collection[str] = frozenset()
    ) -> TimePredictor:
        """Arrange rows; failures and problems that cannot be read from their key are left out."""
        known: list[tuple[Problem, Measurement]] = []
        for row in rows:
            problem = _read(row.problem) if row.ok and row.samples >= MIN_SAMPLES else None
            if problem is not None:
                known.append((problem, row))
        found = TimePredictor(fit_roofline(known), measurements=len(known), model=model, fusing=frozenset(fusing))
        for problem, row in known:
            kind = kind_of(problem)
            if not row.deterministic:
                found.unsteady.add((kind, row.config))
            if kind is not None and isinstance(problem, LAYERS):
                ratio = math.log(row.median_us / found.roofline.time_us(problem))
                expected_us = model(problem, row.config)
                against = math.log(row.median_us / expected_us) if expected_us else None
                seen = _Sample(sizes_key(problem), coordinates_of(problem), ratio, against)
                found.seen.setdefault(kind, {}).setdefault(row.config, []).append(seen)
        return found

    def without(self, problem: Problem) -> TimePredictor:
        """The same, had this problem never been measured, in any memory format and with any epilogue: for honest tests."""
        if kind_of(problem) is None:
            return self
        gone = sizes_key(problem)
        kept = replace(self, seen={})
        for kind, configs in self.seen.items():
            left = {config: [s for s in seen if s.problem != gone] for config, seen in configs.items()}
            kept.seen[kind] = {config: seen for config, seen in left.items() if seen}
        return kept

    def predict(self, problem: Problem, space: Mapping[str, Sequence[EngineConfig]]) -> dict[EngineConfig, float]:
        """Times in microseconds of those configs of a problem's space that something is known of; the baseline's always.

        Args:
            problem: what is to be computed.
            space: every supporting engine's configs, the default first.
        """
        return self._with_baseline(problem, space, self._evidence(problem, space))

    def _with_baseline(
        self, problem: Problem, space: Mapping[str, Sequence[EngineConfig]], times: dict[EngineConfig, float]
    ) -> dict[EngineConfig, float]:
        for config in space.get(BASELINE, ())[:1]:
            times.setdefault(config, _BASELINE_FACTOR * self.roofline.time_us(problem))
        return times

    def _evidence(self, problem: Problem, space: Mapping[str, Sequence[EngineConfig]]) -> dict[EngineConfig, float]:
        """Times of the configs that something is known of."""
        if not self.measurements:
            return {}
        return self._layer(problem, space) if isinstance(problem, LAYERS) else self._pass(problem, space)

    def predict_with(
        self,
        problem: Problem,
        space: Mapping[str, Sequence[EngineConfig]],
        *,
        regrets: Mapping[str, float] | None = None,
        estimate: Callable[[EngineConfig], float | None] = lambda config: None,  # noqa: ARG005
    ) -> dict[EngineConfig, float]:
        """`predict`, with what else can be known without measuring.

        An engine that was never measured on anything like the problem is taken at its cost model's word and something on top.
        Then each engine's time is moved towards what the criteria expect: both are wrong now and then, in different places.

        Args:
            problem: what is to be computed.
            space: every supporting engine's configs, the default first.
            regrets: what the criteria expect of each engine (`Criteria.regrets`); None: they do not cover the problem.
            estimate: an engine's cost model.
        """
        times = self._evidence(problem, space)
        known = {config.engine for config in times}
        if isinstance(problem, LAYERS) and (self.measurements or regrets):
            for engine in (engine for engine in space if engine not in known):
                promised = {config: value for config in space[engine] if (value := estimate(config)) is not None}
                if promised:
                    likely = min(promised, key=promised.__getitem__)
                    times[likely] = UNMEASURED_FACTOR * promised[likely]
        judged = {config.engine for config in times}
        times = self._with_baseline(problem, space, times)
        return _blend_with_criteria(times, judged, regrets) if regrets and judged else times

    def _layer(
        self, problem: ConvProblem | LinearProblem, space: Mapping[str, Sequence[EngineConfig]]
    ) -> dict[EngineConfig, float]:
        kind = kind_of(problem)
        known = self.seen.get(kind, {}) if kind is not None else {}
        traits, reference = coordinates_of(problem), self.roofline.time_us(problem)
        found: dict[EngineConfig, float] = {}
        for config in (config for configs in space.values() for config in configs if config in known):
            near = sorted(
                ((distance(traits, seen.traits), seen.log_ratio, seen) for seen in known[config]),
                key=lambda item: item[:2],
            )[:MAX_NEIGHBOURS]
            if near[0][0] > MAX_DISTANCE:
                continue
            expected_us = self.model(problem, config)
            against = [seen.log_model for _, _, seen in near if seen.log_model is not None]
            modelled = expected_us and len(against) == len(near)
            ratios = against if modelled else [ratio for _, ratio, _ in near]
            weights = [2.0 ** -(2 * far) for far, _, _ in near]
            mean = sum(w * ratio for w, ratio in zip(weights, ratios, strict=True)) / sum(weights)
            times_us = expected_us if expected_us and modelled else reference
            # A config known from afar alone must promise more: what is nearer is surer.
            found[config] = times_us * math.exp(mean) * (1 + DISTANCE_PENALTY * near[0][0])
        return found

    def _pass(self, problem: Problem, space: Mapping[str, Sequence[EngineConfig]]) -> dict[EngineConfig, float]:
        """Copies and pieces of the graph: passes over memory, one an operator where nothing fuses them.

        ATen is taken to need two where the compiler is on offer, for a lone operator too.
        """
        operators = problem.text.count(" = ") if isinstance(problem, SubgraphProblem) else 1
        fusing = self.fusing & space.keys()
        passes = dict.fromkeys(fusing, 1.0) | {BASELINE: max(operators, ATEN_PASSES if fusing else 1.0)}
        once = self.roofline.time_us(problem)
        return {configs[0]: once * passes.get(engine, max(1, operators)) for engine, configs in space.items()}


def _blend_with_criteria(
    times: dict[EngineConfig, float], judged: Collection[str], regrets: Mapping[str, float]
) -> dict[EngineConfig, float]:
    """Times with every engine's best moved to the mean, in logarithms, of what is predicted and what the criteria expect.

    Of an engine that nothing else is known of (`judged` does not hold it) the criteria alone decide.
    """
    best: dict[str, float] = {}
    for config, time_us in times.items():
        best[config.engine] = min(time_us, best.get(config.engine, math.inf))
    least = min(best[engine] for engine in judged)

    def factor(engine: str) -> float:
        if engine not in regrets:
            return 1.0
        behind = math.log(best[engine] / least)
        share = CRITERIA_WEIGHT if engine in judged else 1.0
        return math.exp(share * (regrets[engine] - behind))

    factors = {engine: factor(engine) for engine in best}
    return {config: time_us * factors[config.engine] for config, time_us in times.items()}


CRITERIA_WEIGHT: Final = 0.5
"""Share of the criteria in what is expected of an engine. On the layers of six nets on an H100, net by net left out, any share
from 0.5 to 0.8 picked equally well (bench/tuning/criteria.py)."""

UNMEASURED_FACTOR: Final = 1.3
"""What an engine is taken to need of what its cost model says, where nothing like the problem was measured: the models of the
Triton engines were 10 % too low on average on an H100, those of torch's operations 30 to 60 %."""

DISTANCE_PENALTY: Final = 0.1
"""Share added for each power of two between a problem and its nearest neighbour."""

_BASELINE_FACTOR: Final = 4.0
"""What the baseline is taken to be of the roofline where nothing like the problem was ever measured: it was 3 to 6 times on
the layers of five nets at batch 1 on an H100."""


@lru_cache(maxsize=1 << 10)
def _read(key: str) -> Problem | None:
    """The problem of a key, where its times say something of others'.

    A piece of the graph cannot be read from its own key, and a layer on pruned weights does only some of its operations: the
    rates that it seems to reach are nobody else's, not those of another mask either.
    """
    if is_subgraph_key(key):
        return None
    try:
        problem = parse_problem(key, "")
    except InputError:
        return None
    return None if isinstance(problem, ConvProblem) and problem.weight_mask else problem


def predicted_rows(
    experience: TimePredictor,
    problem: Problem,
    space: Mapping[str, Sequence[EngineConfig]],
    target: str,
    protocol: str,
    *,
    regrets: Mapping[str, float] | None = None,
    estimate: Callable[[EngineConfig], float | None] = lambda config: None,  # noqa: ARG005
) -> list[Measurement]:
    """Predictions as rows without samples; they are never stored.

    Args:
        experience: what is known.
        problem: what is to be computed.
        space: every supporting engine's configs, the default first.
        target: the target's digest.
        protocol: the protocol's id.
        regrets: what the criteria expect of each engine; None: they do not cover the problem.
        estimate: an engine's cost model.
    """
    reason = f"predicted from {experience.measurements} measurements of other problems"
    reason += " and the criteria" if regrets else ""
    times = experience.predict_with(problem, space, regrets=regrets, estimate=estimate)
    return [
        Measurement(
            problem.key,
            config,
            target,
            protocol,
            Status.OK,
            median_us=time_us,
            deterministic=(kind_of(problem), config) not in experience.unsteady,
            reason=reason,
        )
        for config, time_us in times.items()
    ]
