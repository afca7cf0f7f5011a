"""The staged search: the database first, then few samples for many candidates and many samples for few."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Final
from typing import Protocol as Interface

from convoy.engines.base import Engine
from convoy.engines.manifest import BASELINE, load_engine
from convoy.engines.zeros import CURVE, Levels
from convoy.errors import InputError
from convoy.measurement.candidate import shared_data
from convoy.measurement.criteria import Criteria
from convoy.measurement.criteria_file import find_criteria
from convoy.measurement.kin import kin_of
from convoy.measurement.precision import adopted, heeds, twins
from convoy.measurement.predict import Estimate, Experience
from convoy.measurement.protocol import Protocol, protocol_for
from convoy.measurement.runner import Request, Runner
from convoy.measurement.task import Task
from convoy.perfdb.row import Measurement
from convoy.problem import ConvProblem, EngineConfig, LayoutProblem, LinearProblem, Problem, SubgraphProblem
from convoy.settings import Effort, Settings
from convoy.target import Target

Progress = Callable[[int, int, str], None]

Stage = Callable[[Task, Protocol, Effort], Request | None]
"""What a stage wants to know next of a problem; None: nothing more."""

STAGES: Final[tuple[Stage, ...]] = (Task.first_look, Task.widen, Task.finals)


_Knowledge = Callable[[], tuple[Experience, Criteria | None]]
"""Reads what predictions rest on: seconds for tens of thousands of rows, so only where something is to be predicted."""


class Store(Interface):
    """What the search wants of a database."""

    def lookup(self, problem: str, target: str, protocol: str, /) -> Sequence[Measurement]:
        """Rows of a problem on a target."""
        ...

    def put(
        self, rows: Sequence[Measurement], texts: Mapping[str, str] = ..., /, *, targets: Sequence[Target] = ...
    ) -> object:
        """Keep rows, and what their targets' digests stand for."""
        ...

    def related(self, target: Target, protocols: Sequence[str], /) -> Sequence[Measurement]:
        """Good rows of devices like this one."""
        ...

    def targets(self) -> Mapping[str, Target]:
        """Targets that are described, by digest."""
        ...


@dataclass(slots=True)
class SearchResult:
    """What was found.

    Attributes:
        rows: by problem key, every row that the settings allow, failures too.
        refusals: by problem key, each engine that said no, with its reason.
        measured: candidates that were measured now.
        from_database: candidates whose rows were there already and served.
        predicted: problems whose times are predicted, because effort `none` measures nothing, or time was up.
        cut: where time was up, what had been done by then; empty where the search was whole.
    """

    rows: dict[str, list[Measurement]] = field(default_factory=dict[str, list[Measurement]])
    refusals: dict[str, dict[str, str]] = field(default_factory=dict[str, dict[str, str]])
    measured: int = 0
    from_database: int = 0
    predicted: int = 0
    cut: str = ""


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
    zeros: Mapping[str, Collection[Levels]] | None = None,
) -> SearchResult:
    """Find out what every engine takes for every problem.

    A candidate with a row for this target and protocol, a failure too, is not tried again. New rows are kept as they come,
    so that an interruption loses nothing that was finished. Stages: every engine's default knobs, with few samples;
    other knobs of the engines that come near the best; all samples for the best and the baseline.

    On a CPU one problem goes through all stages before the next, so that its data is made once. On a GPU each stage goes
    through all problems, so that kernels are compiled in parallel for all of them while the first are measured; at effort
    `quick` those that are predicted to win come first (`Task.expect`).

    Args:
        problems: each is searched once, however often it occurs.
        engine_ids: engines that compete; those that the settings exclude and the oracle are left out.
        target: the device.
        settings: effort, time, and what is allowed.
        database: where rows come from and go to.
        runner: who measures; not called where the database knows everything.
        on_progress: told (done, total, what is looked at).
        baseline_only: keys of problems that the baseline alone need be measured on.
        zeros: by problem key, what the inputs of the layers that have it could spare (`convoy.engines.zeros`); engines that
            skip zeros are measured for these, and for none where nothing is said.

    Raises:
        InputError: an unknown engine id, an extra engine that cannot be imported, or a damaged criteria file.
        LaunchError: nothing can be measured here (see `Runner`).
    """
    protocol = protocol_for(settings.effort, target.device)
    distinct = _by_shared_data({problem.key: problem for problem in problems}.values())
    engines = _competitors(engine_ids, settings)
    tasks = [_task(p, engines, target, settings, baseline_only, zeros or {}) for p in distinct]
    knowledge = partial(_knowledge, engines, target, protocol, database, settings.db)
    alike = twins(target, database.targets().values())
    for task in tasks:
        task.take_known(_known_rows(task.problem, target, alike, protocol, database))
    if settings.effort is Effort.QUICK:
        _take_hints(tasks, target, protocol, database)
        _expect(tasks, knowledge, protocol, target)
    cut = ""
    if settings.effort is not Effort.NONE:
        cut = _Search(tasks, protocol, settings, target, database, runner, on_progress).run()
    if cut or settings.effort is Effort.NONE:
        _predict(tasks, knowledge, protocol, on_progress or _silent)
    return SearchResult(
        rows={task.problem.key: task.result_rows() for task in tasks},
        refusals={task.problem.key: task.refusals for task in tasks},
        measured=sum(len(task.measured) for task in tasks),
        from_database=sum(len(task.rows.keys() - task.measured - task.predicted) for task in tasks),
        predicted=sum(bool(task.predicted) for task in tasks),
        cut=cut,
    )


def _silent(done: int, total: int, message: str) -> None:
    del done, total, message


def _task(
    problem: Problem,
    engines: Sequence[Engine],
    target: Target,
    settings: Settings,
    baseline_only: Collection[str],
    zeros: Mapping[str, Collection[Levels]],
) -> Task:
    return Task(
        problem,
        engines,
        target,
        deterministic=settings.deterministic,
        baseline_only=problem.key in baseline_only,
        zeros=zeros.get(problem.key, (Levels(),)),
        curve=CURVE if problem.key in zeros else (),
    )


def _known_rows(
    problem: Problem, target: Target, alike: Sequence[Target], protocol: Protocol, database: Store
) -> list[Measurement]:
    """A problem's rows on a target, and on its twins where torch's precision settings do not matter; its own come first."""
    own = database.lookup(problem.key, target.digest, protocol.id)
    others = [] if heeds(problem) else [database.lookup(problem.key, twin.digest, protocol.id) for twin in alike]
    return adopted(own, chain.from_iterable(others), target)


def _take_hints(tasks: Sequence[Task], target: Target, protocol: Protocol, database: Store) -> None:
    """Let tasks know what other devices of the kind, or earlier protocols, found out about their problems."""
    kin = kin_of(target, database.targets().values())
    sources = [(source, protocol.id) for source in kin]
    sources += [(source, earlier) for earlier in protocol.earlier for source in (target, *kin)]
    for task in tasks:
        for source, clock in sources:
            rows = database.lookup(task.problem.key, source.digest, clock)
            if rows and task.take_hints(rows, source, same_clock=clock == protocol.id):
                break


def _predict(tasks: Sequence[Task], knowledge: _Knowledge, protocol: Protocol, report: Progress) -> None:
    """Give times to the problems that no row answers, from rows of other problems on devices like this one."""
    unknown = [task for task in tasks if not task.is_known()]
    if unknown:
        report(0, len(tasks), "predicting from the database")
        experience, criteria = knowledge()
        for task in unknown:
            task.predict(experience, protocol.id, criteria)
    report(len(tasks), len(tasks), "from the database")


def _expect(tasks: Sequence[Task], knowledge: _Knowledge, protocol: Protocol, target: Target) -> None:
    """Let predictions say what is compiled first, where there is a choice of compilers: on a GPU."""
    if target.device != "cuda":
        return
    unknown = [t for t in tasks if t.wants_expectation() and not t.is_done(protocol, Effort.QUICK)]
    if unknown:
        experience, criteria = knowledge()
        for task in unknown:
            task.expect(experience, criteria)


def _knowledge(
    engines: Sequence[Engine], target: Target, protocol: Protocol, database: Store, path: Path | None
) -> tuple[Experience, Criteria | None]:
    """What predictions rest on: all that was measured on devices like this one by now, and the criteria beside a database."""
    rows = database.related(target, (protocol.id, *protocol.earlier))
    return Experience.of(rows, cost_models(engines, target)), find_criteria(target, path)


def cost_models(engines: Sequence[Engine], target: Target) -> Estimate:
    """What the engines' cost models say of any problem; None of an engine that is not here, and of one that raises."""
    by_id = {engine.id: engine for engine in engines}

    def estimate(problem: Problem, config: EngineConfig) -> float | None:
        engine = by_id.get(config.engine)
        if engine is None or engine.version != config.version:
            return None
        try:
            return engine.estimate_us(problem, config.knobs, target)
        except Exception:  # a broken cost model is no cost model
            return None

    return estimate


def _by_shared_data(problems: Iterable[Problem]) -> list[Problem]:
    """In order of first mention, but those that can use the same data side by side."""
    groups: dict[str, list[Problem]] = {}
    for problem in problems:
        groups.setdefault(shared_data(problem), []).append(problem)
    return [problem for group in groups.values() for problem in group]


def _competitors(engine_ids: Sequence[str], settings: Settings) -> list[Engine]:
    only, deny = settings.only_engines, settings.deny_engines
    wanted = [e for e in engine_ids if e == BASELINE or ((not only or e in only) and e not in deny)]
    engines = [load(engine, settings.engines) for engine in dict.fromkeys(wanted)]
    return [engine for engine in engines if engine.family != "reference"]


def load(engine: str, extra: tuple[str, ...]) -> Engine:
    """Import an engine; one of the user's that cannot be imported is the user's input."""
    try:
        return load_engine(engine, extra)
    except (ImportError, AttributeError) as error:
        expected = "an engine that can be imported"
        raise InputError("engine", engine, expected, f"{type(error).__name__}: {error}.") from error


class _Search:
    """One search on its way."""

    def __init__(
        self,
        tasks: list[Task],
        protocol: Protocol,
        settings: Settings,
        target: Target,
        database: Store,
        runner: Runner,
        on_progress: Progress | None,
    ) -> None:
        self.tasks, self.protocol, self.effort, self.target = tasks, protocol, settings.effort, target
        self._seconds, self._end = settings.tune_s, time.monotonic() + settings.tune_s
        self.database, self.runner = database, runner
        self._report = on_progress or _silent
        self._done = 0

    def run(self) -> str:
        """All stages of all tasks, or as many as there is time for: then what was done, else nothing."""
        # Compiled while what needs no compiler is measured.
        if likely := [request for task in self.tasks if (request := task.likely()) is not None]:
            self.runner.prepare(likely)
        chunks = [self.tasks] if self.target.device == "cuda" else [[task] for task in self.tasks]
        for chunk in chunks:
            for stage in STAGES:
                if not self._run_stage(chunk, stage):
                    return f"after {self._seconds:g} s, with {self._done} of {self._total} stages of the search done"
        self._report(self._done, self._total, "measured")
        return ""

    @property
    def _total(self) -> int:
        return len(self.tasks) * len(STAGES)

    def _run_stage(self, chunk: list[Task], stage: Stage) -> bool:
        """Ask every task for its next request until none has any; whether there was time for it."""
        for task in chunk:
            if task.is_done(self.protocol, self.effort):
                self._step()
        waiting = [task for task in chunk if not task.is_done(self.protocol, self.effort)]
        while waiting:
            asked = [(task, stage(task, self.protocol, self.effort)) for task in waiting]
            waiting = []
            # What wants no compiler is measured while the builders start and compile the rest.
            asked.sort(key=lambda pair: pair[1] is not None and pair[0].compiles(pair[1]))
            self.runner.prepare([request for _, request in asked if request is not None])
            for task, request in asked:
                if request is None:
                    self._step()
                    continue
                if time.monotonic() > self._end:
                    return False
                self._report(self._done, self._total, label(task.problem))
                self._measure(task, request)
                waiting.append(task)
        return True

    def _step(self) -> None:
        self._done += 1

    def _measure(self, task: Task, request: Request) -> None:
        """Measure, and keep what was found, when interrupted too."""
        fresh: list[Measurement] = []
        texts = {task.problem.key: task.problem.text} if isinstance(task.problem, SubgraphProblem) else {}
        try:
            for row in self.runner.measure(request, self.protocol):
                fresh.append(row)
                task.take(row)
        finally:
            if fresh:
                self.database.put(fresh, texts, targets=(self.target,))


def label(problem: Problem) -> str:
    """A problem in a few words, for people who wait."""
    if isinstance(problem, SubgraphProblem):
        return f"{problem.label or 'operations'}, {problem.layout}"
    if isinstance(problem, ConvProblem):
        sizes = f"{problem.c}x{problem.h}x{problem.w} to {problem.k}, {problem.r}x{problem.s}"
        return f"conv {sizes}, {problem.layout}, {problem.epilogue}"
    if isinstance(problem, LinearProblem):
        return f"linear {problem.c} to {problem.k}, {problem.epilogue}"
    assert isinstance(problem, LayoutProblem)
    return f"copy {problem.spec} from {problem.source} to {problem.layout}"
