"""The staged search: few samples for many candidates, many samples for few; the database first."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol as Interface

from convoy.engines.base import Engine
from convoy.engines.manifest import BASELINE, load_engine
from convoy.measurement.prebuild import prebuild
from convoy.measurement.protocol import Protocol, protocol_for
from convoy.measurement.runner import Request, Runner
from convoy.perfdb.row import Measurement
from convoy.problem import ConvProblem, EngineConfig, Problem, SubgraphProblem
from convoy.settings import Effort, Settings
from convoy.target import Target

QUICK_KNOBS = 6
"""Knob settings of one engine tried at effort `quick`, in the order of its space."""

QUICK_COMPILED = 4
"""The same for engines that compile: a build takes one to two seconds of a core."""

FINALISTS = 3
"""Candidates timed with all samples, besides the baseline."""

Progress = Callable[[int, int, str], None]


class Store(Interface):
    """What the search wants of a database."""

    def lookup(self, problem: str, target: str, protocol: str) -> list[Measurement]:
        """Rows of a problem on a target."""
        ...

    def put(self, rows: Sequence[Measurement], texts: Mapping[str, str] = ...) -> int:
        """Keep rows."""
        ...


@dataclass(slots=True)
class SearchResult:
    """What was found.

    Attributes:
        rows: every row of every problem, failures too, by problem key.
        refusals: by problem key, each engine that said no, with its reason.
        measured: candidates that were measured now.
        from_database: candidates whose rows were there already.
    """

    rows: dict[str, list[Measurement]] = field(default_factory=dict[str, list[Measurement]])
    refusals: dict[str, dict[str, str]] = field(default_factory=dict[str, dict[str, str]])
    measured: int = 0
    from_database: int = 0


@dataclass(frozen=True, slots=True)
class _Question:
    """One problem with what is known of it and what is to be found out."""

    problem: Problem
    rows: dict[EngineConfig, Measurement]
    unknown: tuple[EngineConfig, ...]
    lone: bool


def search(
    problems: Sequence[Problem],
    *,
    engine_ids: Sequence[str],
    target: Target,
    settings: Settings,
    database: Store,
    runner: Runner,
    on_progress: Progress | None = None,
    baseline_only: Collection[str] = (),
) -> SearchResult:
    """Find out what every engine takes for every problem.

    A candidate with a row for this target and protocol, a failure too, is not measured again. New rows are kept as they
    come, so that an interruption loses nothing. Rows that the settings do not allow (a nondeterministic candidate where
    `deterministic` is asked for) are left out of the result, never out of the database.

    Args:
        problems: each is searched once, however often it occurs.
        engine_ids: engines that compete.
        target: the device.
        settings: effort and what is allowed.
        database: where rows come from and go to.
        runner: who measures; not called where the database knows everything.
        on_progress: told (done, total, problem).
        baseline_only: keys of problems that the baseline alone need be measured on.
    """
    protocol = protocol_for(settings.effort, target.device)
    distinct = list({problem.key: problem for problem in problems}.values())
    engines = [load_engine(engine, settings.engines) for engine in engine_ids]
    engines = [engine for engine in engines if engine.family != "reference"]
    found = SearchResult()
    questions = [
        _ask(p, engines, target, settings, database, protocol, found, p.key in baseline_only) for p in distinct
    ]
    if target.device == "cuda" and settings.effort is not Effort.NONE:
        _prebuild(questions, {e.id for e in engines if not e.trusted}, target, settings, on_progress)
    for index, question in enumerate(questions):
        if on_progress:
            on_progress(index, len(questions), _label(question.problem))
        if question.unknown and settings.effort is not Effort.NONE:
            _answer(question, runner, protocol, database)
            found.measured += len(question.unknown)
        allowed = {engine.id for engine in engines}
        found.rows[question.problem.key] = [
            row
            for row in question.rows.values()
            if row.config.engine in allowed and not (settings.deterministic and row.ok and not row.deterministic)
        ]
    if on_progress:
        on_progress(len(questions), len(questions), "measured")
    return found


def _ask(
    problem: Problem,
    engines: Sequence[Engine],
    target: Target,
    settings: Settings,
    database: Store,
    protocol: Protocol,
    found: SearchResult,
    baseline_only: bool,
) -> _Question:
    """What is known of a problem, and which candidates are to be measured."""
    configs: list[EngineConfig] = []
    refusals = found.refusals.setdefault(problem.key, {})
    for engine in engines:
        if baseline_only and engine.id != BASELINE:
            refusals[engine.id] = "not measured: the same region with its activation is on offer"
            continue
        support = engine.supports(problem, target)
        if support:
            configs += _configs(engine, problem, target, settings.effort)
        else:
            refusals[engine.id] = support.reason
    rows = {row.config: row for row in database.lookup(problem.key, target.digest, protocol.id)}
    unknown = tuple(config for config in configs if config not in rows)
    found.from_database += len(configs) - len(unknown)
    return _Question(problem, rows, unknown, len(configs) == 1)


def _prebuild(
    questions: Sequence[_Question],
    compiling: Collection[str],
    target: Target,
    settings: Settings,
    on_progress: Progress | None,
) -> None:
    """Compile what is to be measured in parallel processes; the measuring one finds it in the compiler's cache."""
    jobs = [(q.problem, config) for q in questions for config in q.unknown if config.engine in compiling]
    report = (lambda done, total: on_progress(done, total, "compiling kernels")) if on_progress else None
    prebuild(jobs, target, extra_engines=settings.engines, on_progress=report)


def _answer(question: _Question, runner: Runner, protocol: Protocol, database: Store) -> None:
    """Few samples for every candidate, then all samples for the fastest and the baseline."""
    problem = question.problem
    texts = {problem.key: problem.text} if isinstance(problem, SubgraphProblem) else {}
    first = Request(problem, question.unknown, protocol.screen_rounds)
    _measure(first, runner, protocol, database, texts, question.rows)
    if question.lone:
        return
    finalists = _finalists(question.rows.values(), protocol)
    if finalists:
        _measure(Request(problem, finalists, protocol.rounds), runner, protocol, database, texts, question.rows)


def _measure(
    request: Request,
    runner: Runner,
    protocol: Protocol,
    database: Store,
    texts: Mapping[str, str],
    rows: dict[EngineConfig, Measurement],
) -> None:
    fresh: list[Measurement] = []
    try:
        for row in runner.measure(request, protocol):
            rows[row.config] = row
            fresh.append(row)
    finally:
        if fresh:
            database.put(fresh, texts)


def _configs(engine: Engine, problem: Problem, target: Target, effort: Effort) -> list[EngineConfig]:
    space = list(engine.space(problem, target))
    if effort is not Effort.FULL:
        space = space[: QUICK_KNOBS if engine.trusted else QUICK_COMPILED]
    return [engine.config(knobs) for knobs in space]


def _finalists(rows: Iterable[Measurement], protocol: Protocol) -> tuple[EngineConfig, ...]:
    """The fastest by the screening, and the baseline; none where only one candidate is left."""
    right = sorted((row for row in rows if row.ok), key=lambda row: row.median_us)
    first = [row for row in right if row.config.engine != BASELINE][:FINALISTS]
    first += [row for row in right if row.config.engine == BASELINE]
    near = [row for row in first if row.median_us <= protocol.prune * right[0].median_us]
    return tuple(row.config for row in near) if len(near) > 1 else ()


def _label(problem: Problem) -> str:
    if isinstance(problem, SubgraphProblem):
        return problem.label or problem.key
    if isinstance(problem, ConvProblem):
        sizes = f"{problem.c}x{problem.h}x{problem.w} to {problem.k}, {problem.r}x{problem.s}"
        return f"{sizes}, {problem.layout}, {problem.epilogue}"
    return problem.key
