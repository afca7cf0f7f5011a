"""Predicts times from measurements of other problems, for effort `none`, which measures nothing.

The method is nearest neighbours. A config's time on problems of the same kind is taken as a ratio to its engine's cost model,
or to a roofline fitted to all measurements if the engine has no cost model. Nearer problems weigh more. The cost model knows
about tiles and waves; the neighbours say how far off it is. A layer's kind is what decides which code runs (filter, stride,
dilation, groups, memory format, dtype). Distance is measured in the sizes of its implicit GEMM, in powers of two. For an
engine that was never measured on such a layer, its cost model decides. The criteria (`convoy.tune.criteria`) adjust every
engine's time. `bench/tuning/prediction.py` and `bench/tuning/criteria.py` measure how well this chooses, on layers left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Final

import numpy as np

from convoy.engines.manifest import BASELINE
from convoy.graph.ir import LAYERS as LAYER_OPERATORS
from convoy.perfdb.row import Measurement
from convoy.perfdb.time_columns import TimeColumns
from convoy.problem import EngineConfig, LayerProblem, Problem, SubgraphProblem
from convoy.problem.layer_coordinates import (
    LAYERS,
    coordinates_of,
    kind_name,
    kind_of,
    problem_of_key,
    sizes_key,
    sizes_of_key,
)
from convoy.tune.criteria import blend_with_criteria
from convoy.tune.fitted_roofline import Roofline, at_least, fit_roofline
from convoy.tune.layer_samples import KindSamples, Neighbour

MAX_DISTANCE: Final = 8.0
"""Powers of two, summed over all sizes, beyond which a neighbour is ignored."""

MIN_SAMPLES: Final = 2
"""Rows of one sample are ignored: they were pruned after their first run, which on a GPU includes the launch on the host."""

ATEN_PASSES: Final = 2.0
"""Passes that ATen is assumed to need for one operator that the compiler may do better. Of 168 such subgraphs on an H200
(poolings, batch norms and their gradients), ATen was faster on 9; an operator's median was 1.1 to 8.8 times the compiler's
time."""

CostModel = Callable[[Problem, EngineConfig], float | None]
"""An engine's cost model, microseconds; None if it has none."""


def no_cost_model(problem: Problem, config: EngineConfig) -> float | None:
    """The cost model of engines without one."""


class TimePredictor:
    """Predicts times on a device from its measurements.

    Args:
        times: the measurements; those of `MIN_SAMPLES` and more of problems that their key describes are used.
        model: the engines' cost models.
        fusing: ids of the engines that compute a subgraph in one pass (`Engine.fuses_subgraphs`).
        estimating: ids of the engines whose cost models hold for subgraphs (`Engine.estimates_subgraphs`).
        roofline: the device's best rates; None: fitted to the measurements.
        threaded: ids of the engines that threads build (`Engine.builds_in_threads`).

    Attributes:
        roofline: likewise.
        measurements: how many measurements it was made from.
    """

    def __init__(
        self,
        times: TimeColumns,
        model: CostModel = no_cost_model,
        fusing: Collection[str] = frozenset(),
        estimating: Collection[str] = frozenset(),
        roofline: Roofline | None = None,
        threaded: Collection[str] = frozenset(),
    ) -> None:
        self._times = times.taken((times.samples >= MIN_SAMPLES) & times.problems.described[times.problem])
        self._model, self._fusing, self._estimating = model, frozenset(fusing), frozenset(estimating)
        self._threaded = frozenset(threaded)
        self.measurements = len(self._times)
        self.roofline = roofline or fit_roofline(self._times)
        self._roofline_us = self.roofline.times_us(times.problems)
        self._kinds: dict[str, KindSamples] = {}
        self._modelled: dict[int, float | None] = {}  # by the row, the log of its time over the cost model's

    @staticmethod
    def from_rows(
        rows: Iterable[Measurement],
        model: CostModel = no_cost_model,
        fusing: Collection[str] = frozenset(),
        estimating: Collection[str] = frozenset(),
        threaded: Collection[str] = frozenset(),
    ) -> TimePredictor:
        """Make a predictor from rows. Failures, and problems that their key does not describe, are left out."""
        return TimePredictor(TimeColumns.of(rows), model, fusing, estimating, threaded=threaded)

    def _samples(self, kind: str) -> KindSamples:
        """The measurements of a layer kind."""
        if kind not in self._kinds:
            rows = np.flatnonzero(self._times.problems.kinds.equals(kind)[self._times.problem])
            self._kinds[kind] = KindSamples(self._times, rows, self._roofline_us)
        return self._kinds[kind]

    def is_deterministic(self, problem: Problem, config: EngineConfig) -> bool:
        """Whether no measurement of a config, on a problem of the same kind, gave different bits from run to run."""
        return (kind_name(problem), str(config)) not in self._nondeterministic

    @cached_property
    def _nondeterministic(self) -> set[tuple[str, str]]:
        rows = ~self._times.deterministic
        kinds = self._times.problems.kinds.taken(self._times.problem[rows])
        return set(zip(kinds.entries(), self._times.configs.taken(rows).entries(), strict=True))

    def _log_model(self, config: EngineConfig, near: Neighbour) -> float | None:
        """The log of a measurement over its config's cost model; None without a cost model."""
        if near.row not in self._modelled:
            layer = problem_of_key(self._times.problems.keys[self._times.problem[near.row]])
            expected_us = None if layer is None else self._model(layer, config)
            self._modelled[near.row] = math.log(near.median_us / expected_us) if expected_us else None
        return self._modelled[near.row]

    def without(self, problem: Problem) -> TimePredictor:
        """The predictor without the rows of this problem, in any memory format and with any epilogue: for tests."""
        if kind_of(problem) is None:
            return self
        gone, problems = sizes_key(problem), self._times.problems
        kept = np.array([sizes_of_key(key) != gone for key in problems.keys], dtype=np.bool_)
        left = self._times.taken(kept[self._times.problem])
        found = TimePredictor(left, self._model, self._fusing, self._estimating, self.roofline, self._threaded)
        found.measurements = self.measurements
        return found

    def predict(self, problem: Problem, space: Mapping[str, Sequence[EngineConfig]]) -> dict[EngineConfig, float]:
        """Predicted times, microseconds, of the configs that have neighbours; the baseline always has one.

        `space` is every supporting engine's configs, the default first.
        """
        return self._with_baseline(problem, space, self._evidence(problem, space))

    def _with_baseline(
        self,
        problem: Problem,
        space: Mapping[str, Sequence[EngineConfig]],
        times: dict[EngineConfig, float],
        floor_us: float = 0.0,
    ) -> dict[EngineConfig, float]:
        """Add the baseline's time. If nothing was ever measured on the device, that is the floor and a launch."""
        known = self.measurements or not floor_us
        unknown_us = _BASELINE_FACTOR * self.roofline.time_us(problem) if known else self.roofline.launch_us + floor_us
        for config in space.get(BASELINE, ())[:1]:
            times.setdefault(config, unknown_us)
        return times

    def _evidence(self, problem: Problem, space: Mapping[str, Sequence[EngineConfig]]) -> dict[EngineConfig, float]:
        """Times of the configs that have neighbours."""
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
        floor_us: float = 0.0,
    ) -> dict[EngineConfig, float]:
        """`predict`, completed by the cost models and the criteria; no time is below the floor.

        An engine without neighbours gets its cost model's time and a margin. Then the criteria adjust each engine's time:
        both are wrong at times, in different places.

        Args:
            problem: the problem.
            space: every supporting engine's configs, the default first.
            regrets: the criteria's regret of each engine (`Criteria.regrets`); None if they do not cover the problem.
            estimate: an engine's cost model.
            floor_us: time of a direct, dense algorithm at the device's peak rates; 0 if it is not known.
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
        times = self._with_baseline(problem, space, times, floor_us)
        times = blend_with_criteria(times, judged, regrets) if regrets and judged else times
        if self.measurements and not isinstance(problem, LAYERS):
            by_library_us = _BASELINE_FACTOR * floor_us if _layers_inside(problem) else 0.0
            times |= {config: max(times[config], by_library_us) for config in space.get(BASELINE, ())[:1]}
            floor_us = self.roofline.least_pass_us(floor_us)
        return {config: at_least(time_us, floor_us) for config, time_us in times.items()}

    def _layer(self, problem: LayerProblem, space: Mapping[str, Sequence[EngineConfig]]) -> dict[EngineConfig, float]:
        known, reference = self._samples(kind_name(problem)), self.roofline.time_us(problem)
        nearest = known.nearest_to(coordinates_of(problem))
        found: dict[EngineConfig, float] = {}
        for config in (config for configs in space.values() for config in configs):
            text = str(config)
            near = nearest(text) if text in known else []
            if not near or near[0].apart > MAX_DISTANCE:
                continue
            expected_us = self._model(problem, config)
            logs = [self._log_model(config, each) for each in near] if expected_us else []
            against = [log for log in logs if log is not None]
            modelled = expected_us and len(against) == len(near)
            ratios = against if modelled else [math.log(each.median_us / each.roofline_us) for each in near]
            weights = [2.0 ** -(2 * each.apart) for each in near]
            mean = sum(w * ratio for w, ratio in zip(weights, ratios, strict=True)) / sum(weights)
            times_us = expected_us if expected_us and modelled else reference
            # Distant neighbours say less, so a config that has only those is penalised.
            found[config] = times_us * math.exp(mean) * (1 + DISTANCE_PENALTY * near[0].apart)
        return found

    def _pass(self, problem: Problem, space: Mapping[str, Sequence[EngineConfig]]) -> dict[EngineConfig, float]:
        """Times of copies and subgraphs: one pass over memory for each operator, or a single one if an engine fuses them.

        ATen is assumed to need two passes if the compiler is offered, also for a single operator, and several for a layer, which
        it computes by a kernel of a library. A cost model that holds for subgraphs counts with the margin of engines without
        neighbours: the engine is chosen only where it is clearly faster.
        Of two engines that fuse, one that threads build comes first: a first answer waits for no other compiler.
        """
        text = problem.text if isinstance(problem, SubgraphProblem) else ""
        operators = text.count(" = ") or 1
        layers = _layers_inside(problem)
        fusing = self._fusing & space.keys()
        by_aten = operators + (_BASELINE_FACTOR - 1) * layers
        passes = dict.fromkeys(fusing, 1.0) | {BASELINE: max(by_aten, ATEN_PASSES if fusing else 1.0)}
        once = self.roofline.time_us(problem)
        times = {configs[0]: once * passes.get(engine, max(1, operators)) for engine, configs in space.items()}
        if fusing & self._threaded:
            times |= {space[engine][0]: SLOW_BUILD_FACTOR * once for engine in fusing - self._threaded}
        for engine in self._estimating & space.keys():
            if expected_us := self._model(problem, space[engine][0]):
                times[space[engine][0]] = UNMEASURED_FACTOR * expected_us
        return times


UNMEASURED_FACTOR: Final = 1.3
"""Factor on a cost model's time without any neighbour: the models of the Triton engines were 10 % too low on average on an
H100, those of PyTorch's operators 30 to 60 %."""

SLOW_BUILD_FACTOR: Final = 1.05
"""Factor on a compiler that takes seconds, beside an engine that fuses the same subgraph without one."""

DISTANCE_PENALTY: Final = 0.1
"""Share added for each power of two between a problem and its nearest neighbour."""

_BASELINE_FACTOR: Final = 4.0
"""The baseline's time over the roofline without any neighbour: it was 3 to 6 on the layers of five nets at batch 1 on an
H100."""


def _layers_inside(problem: Problem) -> int:
    """How many layers a subgraph has. Its bytes do not say how long they take; a floor does."""
    text = problem.text if isinstance(problem, SubgraphProblem) else ""
    return sum(text.count(f" = {layer}(") for layer in LAYER_OPERATORS)
