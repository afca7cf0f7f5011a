"""Task: one problem on its way through the search. Decides what to measure next from the rows so far; measures nothing."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from convoy.engines.base import DETERMINISTIC, Engine
from convoy.engines.manifest import BASELINE
from convoy.engines.zeros import Levels, expected, expecting, holds
from convoy.errors import InputError
from convoy.measurement.criteria import Criteria
from convoy.measurement.predict import Experience, predicted_rows
from convoy.measurement.protocol import Protocol
from convoy.measurement.runner import Request
from convoy.perfdb.row import Measurement, Status
from convoy.problem import ConvProblem, EngineConfig, Knob, Knobs, Problem
from convoy.settings import Effort
from convoy.support import Support
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
        self.rows: dict[EngineConfig, Measurement] = {}
        self.measured: set[EngineConfig] = set()
        self.predicted: set[EngineConfig] = set()
        self.refusals: dict[str, str] = {}
        self._deterministic = deterministic
        self._spaces: dict[str, list[EngineConfig]] = {}
        self._engines: dict[str, Engine] = {}
        self._finalised: set[EngineConfig] = set()
        self._zeros = sorted(zeros)
        for engine in engines:
            if baseline_only and engine.id != BASELINE:
                self.refusals[engine.id] = "not measured: the same with its activation, or in nhwc, is on offer"
                continue
            if not engine.competes(problem):
                continue  # it competes on the problem without the mask, which is always offered beside this one
            support, space = ask(engine, problem, target)
            space = _wanted(space, deterministic=deterministic)
            if support:
                self._engines[engine.id] = engine
                shares = dict.fromkeys((*self._shares(engine), *curve)) if engine.skips_zeros else (None,)
                self._spaces[engine.id] = [
                    engine.config(k if share is None else expecting(k, share, engine.zeros_kind))
                    for share in shares
                    for k in space
                ]
            else:
                self.refusals[engine.id] = support.reason

    def take_known(self, rows: Iterable[Measurement]) -> None:
        """Take over stored rows that still mean something."""
        valid = {config for space in self._spaces.values() for config in space}
        self.rows.update((row.config, row) for row in rows if row.config in valid)

    def take(self, row: Measurement) -> None:
        """Take a new row."""
        self.rows[row.config] = row
        self.measured.add(row.config)

    def is_known(self) -> bool:
        """Whether the baseline and whatever else was tried have rows: nothing need be predicted."""
        return bool(self._baseline())

    def predict(self, experience: Experience, protocol: str, criteria: Criteria | None = None) -> None:
        """Add rows without samples for configs that have none (see `predict.Experience`): none on pruned weights."""
        if isinstance(self.problem, ConvProblem) and self.problem.weight_mask:
            return
        versions = {name: engine.version for name, engine in self._engines.items()}
        predicted = predicted_rows(
            experience,
            self.problem,
            self._spaces,
            self.target.digest,
            protocol,
            regrets=criteria.regrets(self.problem, versions) if criteria else None,
            estimate=self._estimate_us,
        )
        for row in predicted:
            room = None if row.config in self.rows else self._workspace_bytes(row.config)
            if room is not None:
                self.rows[row.config] = replace(row, workspace_bytes=room)
                self.predicted.add(row.config)

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

        An engine that was passed over as hopeless stays so while the best moves a little: the limit is lower here.
        """
        untried = self._untried()
        if any(not self._is_hopeless(config, effort, HOPELESS / 2) for config in untried):
            return False
        self._pass_over(untried)
        return not self._best() or all(protocol.is_thorough(r.samples) for r in (*self._bests(), *self._baseline()))

    # --- the stages -----------------------------------------------------------------------------------------------------

    def first_look(self, protocol: Protocol, effort: Effort) -> Request | None:
        """Every engine's default knobs, the baseline first; all samples at once where there is nothing to choose.

        At effort `quick` engines with a cost model come after the others, and those without hope not at all.
        """
        untried = self._untried()
        untried.sort(key=lambda config: config.engine != BASELINE)
        wanted = untried
        if effort is not Effort.FULL:
            plain = [config for config in untried if self._estimate_us(config) is None or config.engine == BASELINE]
            wanted = plain or [config for config in untried if not self._is_hopeless(config, effort, HOPELESS)]
            if not wanted:
                self._pass_over(untried)
        alone = sum(map(len, self._spaces.values())) == 1
        return self._request(wanted, protocol.rounds if alone else protocol.few)

    def widen(self, protocol: Protocol, effort: Effort) -> Request | None:
        """Other knobs of the engines that may win: the cost model's favourites, then neighbours of the best so far."""
        wanted = [
            config
            for engine in self._engines.values()
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

    def _is_hopeless(self, config: EngineConfig, effort: Effort, ratio: float) -> bool:
        limit_us, estimate = self._limit_us(), self._estimate_us(config)
        if effort is Effort.FULL or limit_us is None or estimate is None or config.engine == BASELINE:
            return False
        return estimate > ratio * limit_us

    def _pass_over(self, configs: Sequence[EngineConfig]) -> None:
        """Say why engines were not tried."""
        limit_us = self._limit_us()
        for config in configs:
            if limit_us is not None:
                self.refusals[config.engine] = (
                    f"not tried at effort quick: its cost model expects {self._estimate_us(config):.0f} us, "
                    f"the best takes {limit_us:.0f} us"
                )

    def _usable(self, row: Measurement) -> bool:
        return row.ok and (row.deterministic or not self._deterministic)

    def _untried(self) -> list[EngineConfig]:
        """The default of every engine that has no row: of one that skips zeros, for every share."""
        first: dict[tuple[str, int | None], EngineConfig] = {}
        for config in (config for space in self._spaces.values() for config in space):
            first.setdefault((config.engine, expected(config.knobs)), config)
        return [config for config in first.values() if config not in self.rows]

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
            return _by_estimate(smaller, estimates)[:budget]
        if (own is None or own.median_us > PROMISING * best_us) and not hopeful:
            return []
        ordered = _by_estimate(untried, estimates)
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


def ask(engine: Engine, problem: Problem, target: Target) -> tuple[Support, Sequence[Knobs]]:
    """Whether an engine can do a problem, and its space; an engine that raises says no, with what it raised as the reason."""
    try:
        support = engine.accepts(problem, target)
        space = engine.space(problem, target) if support else ()
    except Exception as error:  # one broken engine must not end the search for all others
        return Support.no(f"raised {type(error).__name__} when asked: {error}"), ()
    if support and not space:
        return Support.no("offers no knobs for this problem"), ()
    return support, space


def _wanted(space: Sequence[Knobs], *, deterministic: bool) -> list[Knobs]:
    """Of a space with settings that are there for the same bits' sake: those where that is asked for, else the others."""
    steady = [knobs for knobs in space if knobs.get(DETERMINISTIC)]
    return steady if deterministic and steady else [knobs for knobs in space if not knobs.get(DETERMINISTIC)]


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


def _by_estimate(configs: Sequence[EngineConfig], estimates: Mapping[EngineConfig, float | None]) -> list[EngineConfig]:
    """In the cost model's order; in the space's own where there is none."""
    known = {config: value for config, value in estimates.items() if value is not None}
    return sorted(configs, key=known.__getitem__) if len(known) == len(configs) else list(configs)


def neighbours(knobs: Knobs, others: Sequence[Knobs]) -> list[Knobs]:
    """The settings that differ from one in a single knob, nearest first: by one step of its values, then by two, ..."""
    found: list[tuple[int, Knobs]] = []
    values: dict[str, list[Knob]] = {name: _sorted(k[name] for k in (knobs, *others) if name in k) for name in knobs}
    for other in others:
        if set(other) != set(knobs):
            continue
        changed = [name for name in knobs if other[name] != knobs[name]]
        if len(changed) == 1:
            steps = values[changed[0]]
            found.append((abs(steps.index(other[changed[0]]) - steps.index(knobs[changed[0]])), other))
    return [other for _, other in sorted(found, key=lambda item: item[0])]


def _sorted(values: Iterable[Knob]) -> list[Knob]:
    """Numbers in their order; words, which have none, as they come: the first of the others is the likeliest."""
    distinct = list(dict.fromkeys(values))
    return distinct if any(isinstance(value, str) for value in distinct) else sorted(distinct)
