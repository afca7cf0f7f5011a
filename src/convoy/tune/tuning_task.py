"""One problem in the search: decides from the rows so far what to measure next. It measures nothing itself."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from convoy.engines.activation_sparsity import sparsity_percent
from convoy.engines.manifest import BASELINE
from convoy.measurement.protocol import Protocol
from convoy.measurement.runner import Request
from convoy.perfdb.row import Measurement, Status
from convoy.problem import ConvProblem, EngineConfig
from convoy.problem.layer_coordinates import LAYERS
from convoy.settings import Effort
from convoy.target import Target
from convoy.tune.criteria import Criteria
from convoy.tune.engine_pruning import HOPELESS_RATIO, RECHECK_RATIO, EnginePruning
from convoy.tune.leaderboard import Leaderboard
from convoy.tune.local_search import next_configs
from convoy.tune.predict import TimePredictor
from convoy.tune.predicted_rows import predicted_rows
from convoy.tune.prior import Prior
from convoy.tune.search_space import SearchSpace
from convoy.tune.transfer_hints import TransferHints, hints_from_rows, with_related

FINALISTS: Final = 3
"""Candidates that are timed with all samples, besides the baseline."""

SLOW_US: Final = 50_000.0
"""From this time on, finalists get half of the samples; `Protocol.is_thorough` accepts that. One sample of 50 ms is a mean by
itself, and VGG-16 at batch 8 took ten minutes on two cores with all samples."""

MAX_REQUEST_CONFIGS: Final = 24
"""Most candidates in one request: all of them are held in memory until they are timed."""

NOT_ASKED: Final = "not asked at effort none: the database has the times of other engines for this problem"
"""Why an engine that asks a library (`Engine.asks_library`) has no row."""


class TuningTask:
    """The search state of one problem.

    Args:
        space: the problem's search space.

    Attributes:
        problem: the problem.
        baseline_only: whether only the baseline is measured.
        measured: configs that this search measured.
        predicted: configs whose time is predicted.
    """

    def __init__(self, space: SearchSpace) -> None:
        self.problem = space.problem
        self.baseline_only = space.baseline_only
        self.measured: set[EngineConfig] = set()
        self.predicted: set[EngineConfig] = set()
        self._space = space
        self._board = Leaderboard(space.winning_buckets(), deterministic=space.deterministic)
        self._finalists: set[EngineConfig] = set()
        self._hints = TransferHints()
        self._prior = Prior()

    @property
    def builds_slowly(self) -> bool:
        """Whether an engine that takes long to build competes: its build should begin early."""
        return self._space.builds_slowly()

    @property
    def rows(self) -> dict[EngineConfig, Measurement]:
        """The rows of the space's configs, by config."""
        return self._board.rows

    def refusals(self, effort: Effort) -> dict[str, str]:
        """Why an engine has no row, by engine id: it refused the problem, or a search of this effort left it untried."""
        tried = {config.engine for config in self.rows}
        spared = {engine: NOT_ASKED for engine in self._space.spared if engine not in tried}
        left_out = self._pruning(effort).reasons() if effort is Effort.QUICK else {}
        return {**self._space.refusals, **spared, **left_out}

    def take_known(self, rows: Iterable[Measurement]) -> None:
        """Add stored rows of configs that are still in the space, or of an engine that was not asked."""
        valid, spared = set(self._space), self._space.spared
        self.rows.update(
            (row.config, row)
            for row in rows
            if row.config in valid or spared.get(row.config.engine) == row.config.version
        )

    def take_hints(self, rows: Sequence[Measurement], source: Target, *, same_clock: bool = True) -> bool:
        """Derive hints from another device's rows (`convoy.tune.transfer_hints`), for effort `quick`.

        Engines that skip zeros are left out, because their time depends on the data.

        Returns:
            Whether the rows give any hint.
        """
        valid = {config for config in self._space if not self._space.skips_zeros(config)}
        self._hints = hints_from_rows(rows, valid, source, self._space.target, same_clock=same_clock)
        return bool(self._hints.configs)

    def take(self, row: Measurement) -> None:
        """Add a row that was measured now."""
        self.rows[row.config] = row
        self.measured.add(row.config)

    def is_known(self) -> bool:
        """Whether no prediction is needed: the baseline has a row, and each engine with a cost model was tried or is hopeless.

        A search that was cut short has measured the engines that do not compile everywhere; those seldom win.
        """
        if self._board.baseline() is None:
            return False
        if any(row.ok and self._is_modelled(row.config.engine) for row in self.rows.values()):
            return True
        pruning = self._pruning(Effort.QUICK)
        tried = {config.engine for config in self.rows}
        untried = {name: space[0] for name, space in self._space.configs.items() if name not in tried}
        return not any(
            self._is_modelled(name) and not pruning.is_hopeless(config, RECHECK_RATIO)
            for name, config in untried.items()
        )

    def _is_modelled(self, engine: str) -> bool:
        """Whether it is an engine besides the baseline with a cost model of the problem."""
        space = self._space.configs.get(engine)
        return engine != BASELINE and bool(space) and self._space.estimate_us(space[0]) is not None

    def is_decided(self) -> bool:
        """Whether the engines that were not asked cannot change the choice: a measured engine is as fast as their stored rows."""
        spared = self._space.spared
        measured = [row for row in self.rows.values() if row.ok and row.samples]
        own = [row.median_us for row in measured if row.config.engine in spared]
        others = [
            row.median_us
            for row in measured
            if row.config.engine not in (*spared, BASELINE) and sparsity_percent(row.config.knobs) is None
        ]
        return not spared or (bool(others) and min(others) <= min(own, default=math.inf) and self.is_known())

    def baseline_ran_out_of_memory(self) -> bool:
        """Whether not even the baseline could be measured, for lack of memory; its time must then be predicted."""
        return any(row.config.engine == BASELINE and row.status is Status.OUT_OF_MEMORY for row in self.rows.values())

    def predict(
        self,
        predictor: TimePredictor,
        protocol: str,
        criteria: Criteria | None = None,
        floor_us: float = 0.0,
        related: Sequence[Measurement] = (),
    ) -> None:
        """Add predicted rows, without samples, for configs without a row; none for pruned weights.

        A config that a related device has measured on this very problem (`related`) has its time there, not below the floor.

        If the baseline ran out of memory, other configs that ran out of memory count as unmeasured too. A config whose
        workspace a library must be asked for (`Engine.asks_for_workspace`) gets a row only if it may be chosen: if it is faster
        than all others, or memory counts.
        """
        factor = self._prior.underestimate(self.rows)
        replaced = Status.OUT_OF_MEMORY if self.baseline_ran_out_of_memory() else None
        known = {config for config, row in self.rows.items() if row.status is not replaced}
        predicted = self._predictions(predictor, protocol, criteria, floor_us)
        for row in self._worth_asking(with_related(predicted, related, set(self._space), floor_us)):
            workspace = None if row.config in known else self._space.workspace_bytes(row.config)
            if workspace is not None:
                self.rows[row.config] = replace(row, workspace_bytes=workspace, median_us=factor * row.median_us)
                self.predicted.add(row.config)

    def _worth_asking(self, predicted: Sequence[Measurement]) -> list[Measurement]:
        """The predictions without those that need a library's answer and are not faster than all that need none."""
        asking = {row.config for row in predicted if self._space.asks_for_workspace(row.config)}
        if not asking or self._space.memory_counts:
            return list(predicted)
        least_us = min((row.median_us for row in predicted if row.config not in asking), default=math.inf)
        return [row for row in predicted if row.config not in asking or row.median_us < least_us]

    def set_prior(self, predictor: TimePredictor, criteria: Criteria | None = None) -> None:
        """Choose by prediction what to compile and measure first; a search that is cut short then has the likely winners."""
        compiled = set(filter(self._is_compiled, self._space))
        self._prior = Prior.from_predictions(self._predictions(predictor, "", criteria), compiled, HOPELESS_RATIO)

    def needs_prior(self) -> bool:
        """Whether engines with cost models compile for the problem, without a compiled row and without transfer hints."""
        layer = isinstance(self.problem, LAYERS) or any(e.estimates_subgraphs for e in self._space.engines.values())
        compiled = any(map(self._is_compiled, self._space.defaults))
        tried = any(self._is_compiled(config) for config in self.rows)
        return layer and compiled and not tried and not self._hints.configs

    def likely_request(self, protocol: Protocol) -> Request | None:
        """Configs to compile first and to measure as soon as they are built: those of the prior, or of the hints."""
        hinted = [
            config for config in self._hints.configs if self._space.must_build(config) and config not in self.rows
        ]
        return self._request(self._prior.untried(self.rows) or hinted, protocol.few)

    def uncompiled_request(self, protocol: Protocol) -> Request | None:
        """Configs that need no compiler, to measure while compilers run."""
        pruning = self._pruning(Effort.QUICK)
        untried = [
            config
            for config in pruning.untried()
            if pruning.is_independent(config) and not self._space.must_build(config)
        ]
        return self._request(untried, protocol.few)

    def result_rows(self) -> list[Measurement]:
        """All rows; a row that the settings exclude is `unsupported`, with the reason."""
        return self._board.result_rows()

    def is_done(self, protocol: Protocol, effort: Effort) -> bool:
        """Whether the winner is known: no untried engine may win, and the best rows and the baseline have all samples.

        Hints only shorten a search, so a problem is also done if it would be done without them.
        """
        leaders = [*self._board.best_per_bucket(), *filter(None, [self._board.baseline()])]
        if not all(protocol.is_thorough(row.samples) for row in leaders):
            return False
        return self._pruning(effort).is_exhausted() or (
            bool(self._hints.configs) and self._pruning(effort, TransferHints()).is_exhausted()
        )

    def compiles(self, request: Request) -> bool:
        """Whether a candidate of the request must be compiled first."""
        return any(map(self._space.must_build, request.configs))

    # --- the stages -----------------------------------------------------------------------------------------------------

    def first_look(self, protocol: Protocol, effort: Effort) -> Request | None:
        """Every engine's default knobs, the baseline first; with all samples if there is only one config.

        At effort `quick`, engines with a cost model follow after the other engines and the hinted configs; hopeless engines
        are left out.
        """
        pruning = self._pruning(effort)
        wanted = sorted(pruning.untried(), key=lambda config: config.engine != BASELINE)
        if effort is not Effort.FULL:
            independent = [config for config in wanted if pruning.is_independent(config)]
            wanted = independent or [config for config in wanted if not pruning.is_hopeless(config, HOPELESS_RATIO)]
        alone = len(self._space) == 1
        return self._request(wanted, protocol.rounds if alone else protocol.few)

    def widen(self, protocol: Protocol, effort: Effort) -> Request | None:
        """Further configs of the engines that may win: the cost model's favourites, then neighbours of the best."""
        pruning = self._pruning(effort)
        skipped = {*pruning.settled(), *pruning.reasons()}
        wanted = [
            config
            for engine in self._space.engines.values()
            if engine.id not in skipped
            for bucket in (self._space.buckets if engine.skips_zeros else [None])
            for config in next_configs(self._space, self._board, engine, bucket, full=effort is Effort.FULL)
        ]
        return self._request(list(dict.fromkeys(wanted))[:MAX_REQUEST_CONFIGS], protocol.few)

    def finals(self, protocol: Protocol, effort: Effort) -> Request | None:
        """The best few and the baseline, with all samples, until the best one has all its samples."""
        best = self._board.best()
        known = all(row.config in self._finalists for row in self._board.best_per_bucket())
        if best is None or known or self.is_done(protocol, effort):
            return None
        ranked = [sorted(self._board.usable(b), key=lambda row: row.median_us) for b in self._board.buckets]
        finalists = [row for rows in ranked for row in rows[:FINALISTS]]
        baseline = filter(None, [self._board.baseline()])
        wanted = list(dict.fromkeys(row.config for row in (*baseline, *finalists)))
        self._finalists.update(wanted)
        slow = best.median_us > SLOW_US
        return self._request(wanted, (protocol.rounds + 1) // 2 if slow else protocol.rounds)

    def _request(self, configs: Sequence[EngineConfig], rounds: int) -> Request | None:
        # Later candidates are pruned against earlier ones, so configs for many zeros come last.
        ordered = sorted(configs, key=lambda config: sparsity_percent(config.knobs) or 0)
        return Request(self.problem, tuple(ordered), rounds, self._board.limit_us() or 0.0) if configs else None

    def _pruning(self, effort: Effort, hints: TransferHints | None = None) -> EnginePruning:
        return EnginePruning(self._space, self._board, hints or self._hints, effort is Effort.FULL)

    def _predictions(
        self, predictor: TimePredictor, protocol: str, criteria: Criteria | None, floor_us: float = 0.0
    ) -> list[Measurement]:
        pruned = isinstance(self.problem, ConvProblem) and self.problem.weight_mask
        if pruned or self._space.measured_only:
            return []
        return predicted_rows(
            predictor,
            self.problem,
            self._space.configs,
            self._space.target.digest,
            protocol,
            regrets=criteria.regrets(self.problem, self._space.versions) if criteria else None,
            estimate=self._space.estimate_us,
            floor_us=floor_us,
        )

    def _is_compiled(self, config: EngineConfig) -> bool:
        return self._space.must_build(config) and not self._space.skips_zeros(config)
