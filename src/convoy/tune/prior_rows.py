"""What is known before anything is measured: a problem's own rows, what other devices hint at, and what predictions rest on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Protocol as Interface

from convoy.engines.base import Engine
from convoy.measurement.protocol import Protocol
from convoy.perfdb.row import Measurement, Status
from convoy.problem import EngineConfig, Problem
from convoy.settings import Effort
from convoy.target import Target
from convoy.tune.criteria import Criteria
from convoy.tune.criteria_file import find_criteria
from convoy.tune.precision import depends_on_precision, reuse_rows
from convoy.tune.predict import CostModel, TimePredictor
from convoy.tune.transfer_hints import related_targets
from convoy.tune.tuning_task import TuningTask

SearchProgress = Callable[[int, int, str], None]
"""Told (done, total, what is looked at)."""


class RowStore(Interface):
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


def known_rows(
    problem: Problem, target: Target, alike: Sequence[Target], protocol: Protocol, database: RowStore
) -> list[Measurement]:
    """A problem's rows on a target, and on its twins where torch's precision settings do not matter; its own come first."""
    own = database.lookup(problem.key, target.digest, protocol.id)
    others = (
        []
        if depends_on_precision(problem)
        else [database.lookup(problem.key, twin.digest, protocol.id) for twin in alike]
    )
    return reusable_rows(reuse_rows(own, chain.from_iterable(others), target), target)


def reusable_rows(rows: Iterable[Measurement], target: Target) -> list[Measurement]:
    """Rows that say something of another day too.

    What had no room on a GPU may have it when others do not use it, or more is allowed (`Settings.tuning_memory_bytes`), and
    trying it costs next to nothing. On a CPU the system ends a process that takes too much: nobody wants to see that twice.
    """
    return [row for row in rows if target.device != "cuda" or row.status is not Status.OUT_OF_MEMORY]


def add_transfer_hints(tasks: Sequence[TuningTask], target: Target, protocol: Protocol, database: RowStore) -> None:
    """Let tasks know what other devices of the kind, or earlier protocols, found out about their problems."""
    kin = related_targets(target, database.targets().values())
    sources = [(source, protocol.id) for source in kin]
    sources += [(source, earlier) for earlier in protocol.earlier for source in (target, *kin)]
    for task in tasks:
        for source, clock in sources:
            rows = database.lookup(task.problem.key, source.digest, clock)
            if rows and task.take_hints(rows, source, same_clock=clock == protocol.id):
                break


def add_predictions(
    tasks: Sequence[TuningTask], knowledge: PredictorSource, protocol: Protocol, report: SearchProgress
) -> None:
    """Give times to the problems that no row answers, from rows of other problems on devices like this one."""
    unknown = [task for task in tasks if not task.is_known()]
    if unknown:
        report(0, len(tasks), "predicting from the database")
        fresh = (task.rows[config] for task in tasks for config in task.measured)
        experience, criteria = knowledge.with_rows(fresh)
        for task in unknown:
            task.predict(experience, protocol.id, criteria)
    report(len(tasks), len(tasks), "from the database")


def set_priors(tasks: Sequence[TuningTask], knowledge: PredictorSource, protocol: Protocol, target: Target) -> None:
    """Let predictions say what is compiled first, where there is a choice of compilers: on a GPU."""
    if target.device != "cuda":
        return
    unknown = [t for t in tasks if t.wants_expectation() and not t.is_done(protocol, Effort.QUICK)]
    if unknown:
        experience, criteria = knowledge.with_rows()
        for task in unknown:
            task.expect(experience, criteria)


class PredictorSource:
    """What predictions rest on: all that was measured on devices like this one, and the criteria beside a database.

    It is read once, and only where something is to be predicted: tens of thousands of rows take seconds.
    """

    def __init__(
        self, engines: Sequence[Engine], target: Target, protocol: Protocol, database: RowStore, path: Path | None
    ) -> None:
        self._models, self._database, self._path = cost_models(engines, target), database, path
        self._fusing = frozenset(engine.id for engine in engines if engine.fuses_subgraphs)
        self._target, self._protocol = target, protocol
        self._rows: Sequence[Measurement] | None = None

    def with_rows(self, fresh: Iterable[Measurement] = ()) -> tuple[TimePredictor, Criteria | None]:
        """Experience of the rows that were there, and of those that were measured since."""
        if self._rows is None:
            self._rows = self._database.related(self._target, (self._protocol.id, *self._protocol.earlier))
        predictor = TimePredictor.of(chain(self._rows, fresh), self._models, self._fusing)
        return predictor, find_criteria(self._target, self._path)


def cost_models(engines: Sequence[Engine], target: Target) -> CostModel:
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
