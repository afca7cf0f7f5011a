"""Task: one problem on its way through the search. Decides what to measure next from the rows so far; measures nothing."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from convoy.engines.base import Engine
from convoy.engines.manifest import BASELINE
from convoy.engines.zeros import Levels, expected, expecting, holds
from convoy.errors import InputError
from convoy.measurement import kin
from convoy.measurement.criteria import Criteria
from convoy.measurement.expectation import Expectation
from convoy.measurement.likeness import LAYERS
from convoy.measurement.offers import by_estimate, neighbours, offered
from convoy.measurement.predict import Experience, predicted_rows
from convoy.measurement.protocol import Protocol
from convoy.measurement.runner import Request
from convoy.perfdb.row import Measurement, Status
from convoy.problem import ConvProblem, EngineConfig, Problem
from convoy.settings import Effort
from convoy.target import Target

PROMISING: Final = 1.5
"""An engine is searched further while its best comes within this factor of the best of all, or its cost model says that
another setting would: on real layers, knobs move one engine's time by less than that once its default is sane."""

HOPELESS: Final = 4.0
"""At effort `quick`, an engine whose cost model expects this many times the best measured time is not even tried: room for a
model that is wrong by a factor of two, and for knobs that bring as much again."""

QUICK_KNOBS: Final = 8
"""Settings of one engine tried besides its default at effort `quick`, where the engine names no number of its own
(`Engine.quick_settings`)."""

QUICK_COMPILED: Final = 4
"""The same for an engine that compiles (`Engine.trusted` is False): a build takes one to two seconds of a core."""

FINALISTS: Final = 3
"""Candidates timed with all samples, besides the baseline."""

SLOW_US: Final = 50_000.0
"""From here on finalists are timed half as often, which `Protocol.is_thorough` still takes for all samples: a sample of a
twentieth of a second is a mean by itself, and VGG-16 at batch 8 took ten minutes on two cores."""

BATCH: Final = 24
"""Candidates in one request, at most: they wait for each other in memory."""


class Task:
    """What is known of one problem.

    Args:
        problem: what is computed.
        engines: all that compete.
        target: the device.
        deterministic: whether candidates that may give other bits from run to run are out.
        baseline_only: whether to measure the baseline alone, because a larger region does the same and more.
        zeros: what the inputs of the layers with this problem could spare: engines that skip zeros are measured for each
            share of what they leave out, and compete for each (`convoy.engines.zeros`).
        curve: further percentages of it that such engines are looked at for, for the report's sake.

    Attributes:
        baseline_only: as given.
        rows: by config: every row that counts, of an engine that supports the problem, in its present version, with knobs
            of its present space.
        measured: configs measured in this search.
        predicted: configs whose time is predicted.
        refusals: by engine id, why not.
    """

    def __init__(
        self,
        problem: Problem,
        engines: Sequence[Engine],
        target: Target,
        *,
        deterministic: bool = False,
        baseline_only: bool = False,
        zeros: Collection[Levels] = (Levels(),),
        curve: Collection[int] = (),
    ) -> None:
        self.problem = problem
        self.target = target
        self.baseline_only = baseline_only
        self.rows: dict[EngineConfig, Measurement] = {}
        self.measured: set[EngineConfig] = set()
        self.predicted: set[EngineConfig] = set()
        self.refusals: dict[str, str] = {}
        self._deterministic = deterministic
        self._spaces: dict[str, list[EngineConfig]] = {}
        self._engines: dict[str, Engine] = {}
        self._finalised: set[EngineConfig] = set()
        self._hints = kin.Hints()
        self._expectation = Expectation()
        self._zeros = sorted(zeros)
        for engine in engines:
            if baseline_only and engine.id != BASELINE:
                self.refusals[engine.id] = "not measured: the same with its activation, or in nhwc, is on offer"
                continue
            if not engine.competes(problem):
                continue  # it competes on the problem without the mask, which is always offered beside this one
            space, reason = offered(engine, problem, target, deterministic=deterministic)
            if space:
                self._engines[engine.id] = engine
                shares = dict.fromkeys((*self._shares(engine), *curve)) if engine.skips_zeros else (None,)
                self._spaces[engine.id] = [
                    engine.config(k if share is None else expecting(k, share, engine.zeros_kind))
                    for share in shares
                    for k in space
                ]
            else:
                self.refusals[engine.id] = reason

    def take_known(self, rows: Iterable[Measurement]) -> None:
        """Take over stored rows that still mean something."""
        valid = self._valid()
        self.rows.update((row.config, row) for row in rows if row.config in valid)

    def take_hints(self, rows: Sequence[Measurement], source: Target, *, same_clock: bool = True) -> bool:
        """Take what the rows of another device say is worth measuring (`convoy.measurement.kin`); whether they say anything.

        For effort `quick` alone: `full` looks at everything anyway. Engines that skip zeros are left out: what they take depends
        on the data too.
        """
        valid = {config for config in self._valid() if not self._engines[config.engine].skips_zeros}
        self._hints = kin.hints(rows, valid, source, self.target, same_clock=same_clock)
        return bool(self._hints.favourites)

    def _valid(self) -> set[EngineConfig]:
        return {config for space in self._spaces.values() for config in space}

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
            for name, space in self._spaces.items()
            if name != BASELINE and self._estimate_us(space[0]) is not None
        }
        tried = {config.engine for config in self.rows}
        won = any(row.ok and row.config.engine in modelled for row in self.rows.values())
        waiting = any(
            name not in tried and not self._is_hopeless(config, Effort.QUICK, HOPELESS / 2)
            for name, config in modelled.items()
        )
        return bool(self._baseline()) and (won or not waiting)

    def predict(self, experience: Experience, protocol: str, criteria: Criteria | None = None) -> None:
        """Add rows without samples for configs that have none (see `predict.Experience`): none on pruned weights."""
        factor = self._expectation.disappointment(self.rows)
        for row in self._predictions(experience, protocol, criteria):
            room = None if row.config in self.rows else self._workspace_bytes(row.config)
            if room is not None:
                self.rows[row.config] = replace(row, workspace_bytes=room, median_us=factor * row.median_us)
                self.predicted.add(row.config)

    def expect(self, experience: Experience, criteria: Criteria | None = None) -> None:
        """Let predictions say what to compile and to measure first: a search that is cut short has then seen what may win."""
        compiled = {config for config in self._valid() if self._is_compiled(config)}
        self._expectation = Expectation.of(self._predictions(experience, "", criteria), compiled, HOPELESS)

    def wants_expectation(self) -> bool:
        """Whether it is a layer of which nothing that is compiled was measured, and of which no other device tells."""
        layer = isinstance(self.problem, LAYERS)
        compiled = any(self._is_compiled(space[0]) for space in self._spaces.values())
        tried = any(self._is_compiled(config) for config in self.rows)
        return layer and compiled and not tried and not self._hints.favourites

    def likely(self, protocol: Protocol) -> Request | None:
        """What is compiled first, and measured as soon as that is done: what predictions favour, or another device hints at."""
        hinted = [config for config in self._hints.favourites if self._must_build(config) and config not in self.rows]
        return self._request(self._expectation.open(self.rows) or hinted, protocol.few)

    def uncompiled(self, protocol: Protocol) -> Request | None:
        """What can be measured while compilers are at work: of what `first_look` begins with, what needs none."""
        untried = [config for config in self._untried() if self._is_plain(config) and not self._must_build(config)]
        return self._request(untried, protocol.few)

    def _predictions(self, experience: Experience, protocol: str, criteria: Criteria | None) -> list[Measurement]:
        if isinstance(self.problem, ConvProblem) and self.problem.weight_mask:
            return []
        versions = {name: engine.version for name, engine in self._engines.items()}
        return predicted_rows(
            experience,
            self.problem,
            self._spaces,
            self.target.digest,
            protocol,
            regrets=criteria.regrets(self.problem, versions) if criteria else None,
            estimate=self._estimate_us,
        )

    def _is_compiled(self, config: EngineConfig) -> bool:
        return self._must_build(config) and not self._engines[config.engine].skips_zeros

    def _workspace_bytes(self, config: EngineConfig) -> int | None:
        """None where the engine finds that it cannot have these knobs here: a plan of another layer that a library refuses."""
        try:
            return self._engines[config.engine].workspace_bytes(self.problem, config.knobs)
        except InputError:
            return None

    def result_rows(self) -> list[Measurement]:
        """All rows; one that the settings exclude is `unsupported`, with the reason."""
        return [row if self._usable(row) or not row.ok else _excluded(row) for row in self.rows.values()]

    def is_done(self, protocol: Protocol, effort: Effort) -> bool:
        """Whether the winner is known: every engine was tried, and the best and the baseline have all samples.

        What was searched without hints needs none.
        """
        if self._is_done(protocol, effort):
            return True
        hinted, self._hints = self._hints, kin.Hints()
        if hinted.favourites and self._is_done(protocol, effort):
            return True
        self._hints = hinted
        return False

    def _is_done(self, protocol: Protocol, effort: Effort) -> bool:
        """`is_done` with the hints as they are.

        An engine that was passed over as hopeless stays so while the best moves a little: the limit is lower here.
        """
        untried = self._untried()
        if any(not self._is_hopeless(config, effort, HOPELESS / 2) for config in untried):
            return False
        self._pass_over(untried)
        return not self._best() or all(protocol.is_thorough(r.samples) for r in (*self._bests(), *self._baseline()))

    def compiles(self, request: Request) -> bool:
        """Whether one of these candidates must be compiled first."""
        return any(map(self._must_build, request.configs))

    def _must_build(self, config: EngineConfig) -> bool:
        return not self._engines[config.engine].trusted

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
            hopeful = [config for config in untried if not self._is_hopeless(config, effort, HOPELESS)]
            wanted = plain or hopeful
            if not wanted:
                self._pass_over(untried)
        alone = sum(map(len, self._spaces.values())) == 1
        return self._request(wanted, protocol.rounds if alone else protocol.few)

    def widen(self, protocol: Protocol, effort: Effort) -> Request | None:
        """Other knobs of the engines that may win: the cost model's favourites, then neighbours of the best so far."""
        settled = self._settled()
        wanted = [
            config
            for engine in self._engines.values()
            if engine.id not in settled
            for levels in (self._zeros if engine.skips_zeros else [None])
            for config in self._wider(engine, levels, full=effort is Effort.FULL)
        ]
        return self._request(list(dict.fromkeys(wanted))[:BATCH], protocol.few)

    def finals(self, protocol: Protocol, effort: Effort) -> Request | None:
        """The best few and the baseline, all samples, against each other, until one that has them all is the best."""
        best = self._best()
        known = all(row.config in self._finalised for row in self._bests())
        if best is None or known or self.is_done(protocol, effort):
            return None
        ranked = sorted(filter(self._usable, self.rows.values()), key=lambda row: row.median_us)
        finalists = [row for levels in self._classes() for row in _holding(ranked, levels)[:FINALISTS]]
        wanted = list(dict.fromkeys(row.config for row in (*self._baseline(), *finalists)))
        self._finalised.update(wanted)
        slow = best.median_us > SLOW_US
        return self._request(wanted, (protocol.rounds + 1) // 2 if slow else protocol.rounds)

    # --- what they ask themselves ---------------------------------------------------------------------------------------

    def _request(self, configs: Sequence[EngineConfig], rounds: int) -> Request | None:
        # Later candidates are pruned against earlier ones, so those that are for many zeros come last.
        ordered = sorted(configs, key=lambda config: expected(config.knobs) or 0)
        return Request(self.problem, tuple(ordered), rounds, self._limit_us() or 0.0) if configs else None

    def _estimate_us(self, config: EngineConfig) -> float | None:
        try:
            return self._engines[config.engine].estimate_us(self.problem, config.knobs, self.target)
        except Exception:  # a broken cost model is no cost model: the clock decides, and its rows tell
            return None

    def _is_plain(self, config: EngineConfig) -> bool:
        """Whether there is nothing to be waited for before it is measured: what others take says nothing of its hope."""
        hinted = config in self._hints.favourites
        return hinted or config.engine == BASELINE or self._estimate_us(config) is None

    def _is_hopeless(self, config: EngineConfig, effort: Effort, ratio: float) -> bool:
        limit_us, estimate = self._limit_us(), self._estimate_us(config)
        if effort is Effort.FULL or limit_us is None or estimate is None or config.engine == BASELINE:
            return False
        return estimate > ratio * limit_us

    def _pass_over(self, configs: Sequence[EngineConfig]) -> None:
        """Say why engines were not tried."""
        limit_us = self._limit_us()
        tried = {config.engine for config in self.rows}
        for name, behind in self._settled().items():
            if name not in tried:
                self.refusals[name] = (
                    f"not tried at effort quick: on {self._hints.source} it took {behind:.2f} times the best time"
                )
        for config in configs:
            if limit_us is not None:
                self.refusals[config.engine] = (
                    f"not tried at effort quick: its cost model expects {self._estimate_us(config):.0f} us, "
                    f"the best takes {limit_us:.0f} us"
                )

    def _usable(self, row: Measurement) -> bool:
        return row.ok and (row.deterministic or not self._deterministic)

    def _untried(self) -> list[EngineConfig]:
        """The default of every engine that has no row: of one that skips zeros, for every share.

        Also what another device of the kind hints at; of the engines that were searched there nothing else.
        """
        settled = self._settled()
        first: dict[tuple[str, int | None], EngineConfig] = {}
        for config in (config for space in self._spaces.values() for config in space):
            first.setdefault((config.engine, expected(config.knobs)), config)
        wanted = [config for config in first.values() if config.engine not in settled]
        return [config for config in dict.fromkeys((*wanted, *self._hints.favourites)) if config not in self.rows]

    def _settled(self) -> Mapping[str, float]:
        """Engines that need no search here, by how far they were behind there: none once all that was hinted at fails here."""
        tried = [self.rows.get(config) for config in self._hints.favourites]
        failed = bool(tried) and all(row is not None and not self._usable(row) for row in tried)
        return {} if failed else self._hints.behind

    def _shares(self, engine: Engine) -> list[int]:
        """The percentages that the layers have of what an engine leaves out."""
        return sorted({levels.at(engine.zeros_kind) for levels in self._zeros})

    def _classes(self) -> list[Levels]:
        """The kinds of input that there is a winner for: one where no engine skips zeros."""
        return self._zeros if any(engine.skips_zeros for engine in self._engines.values()) else self._zeros[:1]

    def _best(self, levels: Levels | None = None) -> Measurement | None:
        """The fastest that may be used; on inputs of some levels, or on any."""
        rows = filter(self._usable, self.rows.values())
        found = rows if levels is None else _holding(rows, levels)
        return min(found, key=lambda row: row.median_us, default=None)

    def _bests(self) -> list[Measurement]:
        """The fastest on each kind of input."""
        return [row for levels in self._classes() if (row := self._best(levels)) is not None]

    def _limit_us(self) -> float | None:
        """What a candidate must come near to be worth a look: the best time, on the kind of input on which it is longest."""
        return max((row.median_us for row in self._bests()), default=None)

    def _baseline(self) -> list[Measurement]:
        return [row for row in self.rows.values() if row.config.engine == BASELINE and self._usable(row)][:1]

    def _wider(self, engine: Engine, levels: Levels | None, *, full: bool) -> list[EngineConfig]:
        """Settings of one engine to try next, on inputs of some levels; empty when it is out of the race or has had its turns."""
        best = self._best(levels)
        if best is None:
            return []
        best_us = best.median_us
        share = None if levels is None else levels.at(engine.zeros_kind)
        space = [config for config in self._spaces[engine.id] if expected(config.knobs) == share]
        tried = [self.rows[config] for config in space if config in self.rows]
        untried = [config for config in space if config not in self.rows]
        quick = engine.quick_settings
        if quick is None:
            quick = QUICK_KNOBS if engine.trusted else QUICK_COMPILED
        budget = len(untried) if full else quick + 1 - len(tried)
        if not untried or budget <= 0 or (engine.id in self.refusals and not full):
            return []
        own = min(filter(self._usable, tried), key=lambda row: row.median_us, default=None)
        estimates = {config: self._estimate_us(config) for config in untried}
        hopeful = [value for value in estimates.values() if value is not None and value <= best_us]
        if own is None and (smaller := self._smaller(tried, untried)):
            return by_estimate(smaller, estimates)[:budget]
        if (own is None or own.median_us > PROMISING * best_us) and not hopeful:
            return []
        ordered = by_estimate(untried, estimates)
        if full:
            return ordered
        favourites = quick // 2
        if len(tried) <= favourites or own is None:
            return ordered[: min(budget, max(1, favourites + 1 - len(tried)))]
        near = neighbours(own.config.knobs, [config.knobs for config in untried])
        return [replace(own.config, knobs=knobs) for knobs in near][:budget]

    def _smaller(self, tried: Sequence[Measurement], untried: Sequence[EngineConfig]) -> list[EngineConfig]:
        """Settings that want less workspace than those for which there was no memory; none where that was not the reason."""
        wanted = [self._workspace_bytes(row.config) for row in tried if row.status is Status.OUT_OF_MEMORY]
        least = min((size for size in wanted if size is not None), default=0)
        sizes = {config: self._workspace_bytes(config) for config in untried} if least else {}
        return [config for config, size in sizes.items() if size is not None and size < least]


def _holding(rows: Iterable[Measurement], levels: Levels) -> list[Measurement]:
    """The rows of configs that are for inputs of some levels, or for any."""
    return [row for row in rows if holds(row.config.knobs, levels)]


def _excluded(row: Measurement) -> Measurement:
    return Measurement(
        row.problem,
        row.config,
        row.target,
        row.protocol,
        Status.UNSUPPORTED,
        deterministic=row.deterministic,
        reason="may give other bits from run to run, and `deterministic` was asked for",
        versions=row.versions,
        date=row.date,
    )
