"""Task: one problem on its way through the search. Decides what to measure next from the rows so far; measures nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from convoy.engines.activation_sparsity import sparsity_percent
from convoy.engines.manifest import BASELINE
from convoy.measurement.protocol import Protocol
from convoy.measurement.runner import Request
from convoy.perfdb.row import Measurement, Status
from convoy.problem import ConvProblem, EngineConfig
from convoy.settings import Effort
from convoy.target import Target
from convoy.tune import transfer_hints
from convoy.tune.criteria import Criteria
from convoy.tune.leaderboard import Leaderboard
from convoy.tune.local_search import next_configs
from convoy.tune.predict import TimePredictor, predicted_rows
from convoy.tune.prior import Prior
from convoy.tune.problem_distance import LAYERS
from convoy.tune.search_space import SearchSpace

HOPELESS_RATIO: Final = 4.0
"""At effort `quick`, an engine whose cost model expects this many times the best measured time is not even tried: room for a
model that is wrong by a factor of two, and for knobs that bring as much again."""

FINALISTS: Final = 3
"""Candidates timed with all samples, besides the baseline."""

SLOW_US: Final = 50_000.0
"""From here on finalists are timed half as often, which `Protocol.is_thorough` still takes for all samples: a sample of a
twentieth of a second is a mean by itself, and VGG-16 at batch 8 took ten minutes on two cores."""

MAX_REQUEST_CONFIGS: Final = 24
"""Candidates in one request, at most: they wait for each other in memory."""


class TuningTask:
    """What is known of one problem.

    Args:
        space: what is on offer for it.

    Attributes:
        problem: what is computed.
        baseline_only: whether the baseline alone is measured.
        measured: configs measured in this search.
        predicted: configs whose time is predicted.
    """

    def __init__(self, space: SearchSpace) -> None:
        self.problem = space.problem
        self.baseline_only = space.baseline_only
        self.measured: set[EngineConfig] = set()
        self.predicted: set[EngineConfig] = set()
        self._space = space
        self._standing = Leaderboard(space.classes(), deterministic=space.deterministic)
        self._finalised: set[EngineConfig] = set()
        self._hints = transfer_hints.TransferHints()
        self._expectation = Prior()

    @property
    def rows(self) -> dict[EngineConfig, Measurement]:
        """By config: every row of a config that is on offer."""
        return self._standing.rows

    @property
    def refusals(self) -> dict[str, str]:
        """By engine id, why it has no row."""
        return self._space.refusals

    def take_known(self, rows: Iterable[Measurement]) -> None:
        """Take over stored rows that still mean something."""
        valid = set(self._space)
        self.rows.update((row.config, row) for row in rows if row.config in valid)

    def take_hints(self, rows: Sequence[Measurement], source: Target, *, same_clock: bool = True) -> bool:
        """Take what the rows of another device say is worth measuring (`convoy.tune.transfer_hints`); whether they say anything.

        For effort `quick` alone: `full` looks at everything anyway. Engines that skip zeros are left out: what they take depends
        on the data too.
        """
        valid = {config for config in self._space if not self._space.skips_zeros(config)}
        self._hints = transfer_hints.hints_from_rows(rows, valid, source, self._space.target, same_clock=same_clock)
        return bool(self._hints.favourites)

    def take(self, row: Measurement) -> None:
        """Take a new row."""
        self.rows[row.config] = row
        self.measured.add(row.config)

    def is_known(self) -> bool:
        """Whether nothing need be predicted: the baseline has a row, and engines with a cost model had their turn or no hope.

        A search that was cut short has measured what needs no compiler everywhere, and what wins hardly anywhere.
        """
        modelled = {
            name: space[0]
            for name, space in self._space.configs.items()
            if name != BASELINE and self._space.estimate_us(space[0]) is not None
        }
        tried = {config.engine for config in self.rows}
        won = any(row.ok and row.config.engine in modelled for row in self.rows.values())
        waiting = any(
            name not in tried and not self._is_hopeless(config, Effort.QUICK, HOPELESS_RATIO / 2)
            for name, config in modelled.items()
        )
        return self._standing.baseline() is not None and (won or not waiting)

    def baseline_ran_out_of_memory(self) -> bool:
        """Whether there was no memory to measure even the baseline: what it takes must be predicted."""
        return any(row.config.engine == BASELINE and row.status is Status.OUT_OF_MEMORY for row in self.rows.values())

    def predict(self, experience: TimePredictor, protocol: str, criteria: Criteria | None = None) -> None:
        """Add rows without samples for configs that have none (see `predict.TimePredictor`): none on pruned weights.

        What had no room to be measured counts as not measured where the baseline had none either.
        """
        factor = self._expectation.disappointment(self.rows)
        open_ = Status.OUT_OF_MEMORY if self.baseline_ran_out_of_memory() else None
        known = {config for config, row in self.rows.items() if row.status is not open_}
        for row in self._predictions(experience, protocol, criteria):
            room = None if row.config in known else self._space.workspace_bytes(row.config)
            if room is not None:
                self.rows[row.config] = replace(row, workspace_bytes=room, median_us=factor * row.median_us)
                self.predicted.add(row.config)

    def expect(self, experience: TimePredictor, criteria: Criteria | None = None) -> None:
        """Let predictions say what to compile and to measure first: a search that is cut short has then seen what may win."""
        compiled = set(filter(self._is_compiled, self._space))
        self._expectation = Prior.of(self._predictions(experience, "", criteria), compiled, HOPELESS_RATIO)

    def wants_expectation(self) -> bool:
        """Whether it is a layer of which nothing that is compiled was measured, and of which no other device tells."""
        layer = isinstance(self.problem, LAYERS)
        compiled = any(map(self._is_compiled, self._space.defaults()))
        tried = any(self._is_compiled(config) for config in self.rows)
        return layer and compiled and not tried and not self._hints.favourites

    def likely(self, protocol: Protocol) -> Request | None:
        """What is compiled first, and measured as soon as that is done: what predictions favour, or another device hints at."""
        hinted = [
            config for config in self._hints.favourites if self._space.must_build(config) and config not in self.rows
        ]
        return self._request(self._expectation.open(self.rows) or hinted, protocol.few)

    def uncompiled(self, protocol: Protocol) -> Request | None:
        """What can be measured while compilers are at work: of what `first_look` begins with, what needs none."""
        untried = [
            config for config in self._untried() if self._is_plain(config) and not self._space.must_build(config)
        ]
        return self._request(untried, protocol.few)

    def _predictions(self, experience: TimePredictor, protocol: str, criteria: Criteria | None) -> list[Measurement]:
        if isinstance(self.problem, ConvProblem) and self.problem.weight_mask:
            return []
        return predicted_rows(
            experience,
            self.problem,
            self._space.configs,
            self._space.target.digest,
            protocol,
            regrets=criteria.regrets(self.problem, self._space.versions) if criteria else None,
            estimate=self._space.estimate_us,
        )

    def _is_compiled(self, config: EngineConfig) -> bool:
        return self._space.must_build(config) and not self._space.skips_zeros(config)

    def result_rows(self) -> list[Measurement]:
        """All rows; one that the settings exclude is `unsupported`, with the reason."""
        return self._standing.result_rows()

    def is_done(self, protocol: Protocol, effort: Effort) -> bool:
        """Whether the winner is known: every engine was tried, and the best and the baseline have all samples.

        What was searched without hints needs none.
        """
        if self._is_done(protocol, effort):
            return True
        hinted, self._hints = self._hints, transfer_hints.TransferHints()
        if hinted.favourites and self._is_done(protocol, effort):
            return True
        self._hints = hinted
        return False

    def _is_done(self, protocol: Protocol, effort: Effort) -> bool:
        """`is_done` with the hints as they are.

        An engine that was passed over as hopeless stays so while the best moves a little: the limit is lower here.
        """
        untried = self._untried()
        if any(not self._is_hopeless(config, effort, HOPELESS_RATIO / 2) for config in untried):
            return False
        self._pass_over(untried)
        leaders = [*self._standing.bests(), *filter(None, [self._standing.baseline()])]
        return all(protocol.is_thorough(row.samples) for row in leaders)

    def compiles(self, request: Request) -> bool:
        """Whether one of these candidates must be compiled first."""
        return any(map(self._space.must_build, request.configs))

    # --- the stages -----------------------------------------------------------------------------------------------------

    def first_look(self, protocol: Protocol, effort: Effort) -> Request | None:
        """Every engine's default knobs, the baseline first; all samples at once where there is nothing to choose.

        At effort `quick` engines with a cost model come after the others and after what another device hints at, and those
        without hope not at all.
        """
        untried = self._untried()
        untried.sort(key=lambda config: config.engine != BASELINE)
        wanted = untried
        if effort is not Effort.FULL:
            plain = [config for config in untried if self._is_plain(config)]
            hopeful = [config for config in untried if not self._is_hopeless(config, effort, HOPELESS_RATIO)]
            wanted = plain or hopeful
            if not wanted:
                self._pass_over(untried)
        alone = len(self._space) == 1
        return self._request(wanted, protocol.rounds if alone else protocol.few)

    def widen(self, protocol: Protocol, effort: Effort) -> Request | None:
        """Other knobs of the engines that may win: the cost model's favourites, then neighbours of the best so far."""
        settled = self._settled()
        wanted = [
            config
            for engine in self._space.engines.values()
            if engine.id not in settled
            for levels in (self._space.levels if engine.skips_zeros else [None])
            for config in next_configs(self._space, self._standing, engine, levels, full=effort is Effort.FULL)
        ]
        return self._request(list(dict.fromkeys(wanted))[:MAX_REQUEST_CONFIGS], protocol.few)

    def finals(self, protocol: Protocol, effort: Effort) -> Request | None:
        """The best few and the baseline, all samples, against each other, until one that has them all is the best."""
        best = self._standing.best()
        known = all(row.config in self._finalised for row in self._standing.bests())
        if best is None or known or self.is_done(protocol, effort):
            return None
        ranked = [sorted(self._standing.usable(c), key=lambda row: row.median_us) for c in self._standing.classes]
        finalists = [row for rows in ranked for row in rows[:FINALISTS]]
        baseline = filter(None, [self._standing.baseline()])
        wanted = list(dict.fromkeys(row.config for row in (*baseline, *finalists)))
        self._finalised.update(wanted)
        slow = best.median_us > SLOW_US
        return self._request(wanted, (protocol.rounds + 1) // 2 if slow else protocol.rounds)

    # --- what they ask themselves ---------------------------------------------------------------------------------------

    def _request(self, configs: Sequence[EngineConfig], rounds: int) -> Request | None:
        # Later candidates are pruned against earlier ones, so those that are for many zeros come last.
        ordered = sorted(configs, key=lambda config: sparsity_percent(config.knobs) or 0)
        return Request(self.problem, tuple(ordered), rounds, self._standing.limit_us() or 0.0) if configs else None

    def _is_plain(self, config: EngineConfig) -> bool:
        """Whether there is nothing to be waited for before it is measured: what others take says nothing of its hope."""
        hinted = config in self._hints.favourites
        return hinted or config.engine == BASELINE or self._space.estimate_us(config) is None

    def _is_hopeless(self, config: EngineConfig, effort: Effort, ratio: float) -> bool:
        limit_us, estimate = self._standing.limit_us(), self._space.estimate_us(config)
        if effort is Effort.FULL or limit_us is None or estimate is None or config.engine == BASELINE:
            return False
        return estimate > ratio * limit_us

    def _pass_over(self, configs: Sequence[EngineConfig]) -> None:
        """Say why engines were not tried."""
        limit_us = self._standing.limit_us()
        tried = {config.engine for config in self.rows}
        for name, behind in self._settled().items():
            if name not in tried:
                self.refusals[name] = (
                    f"not tried at effort quick: on {self._hints.source} it took {behind:.2f} times the best time"
                )
        for config in configs:
            if limit_us is not None:
                self.refusals[config.engine] = (
                    f"not tried at effort quick: its cost model expects {self._space.estimate_us(config):.0f} us, "
                    f"the best takes {limit_us:.0f} us"
                )

    def _untried(self) -> list[EngineConfig]:
        """The default of every engine that has no row: of one that skips zeros, for every share.

        Also what another device of the kind hints at; of the engines that were searched there nothing else.
        """
        settled = self._settled()
        wanted = [config for config in self._space.defaults() if config.engine not in settled]
        return [config for config in dict.fromkeys((*wanted, *self._hints.favourites)) if config not in self.rows]

    def _settled(self) -> Mapping[str, float]:
        """Engines that need no search here, by how far they were behind there: none once all that was hinted at fails here."""
        tried = [self.rows.get(config) for config in self._hints.favourites]
        failed = bool(tried) and all(row is not None and not self._standing.is_usable(row) for row in tried)
        return {} if failed else self._hints.behind
