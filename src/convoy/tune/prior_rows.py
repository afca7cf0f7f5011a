"""What is known before the search measures: the problem's own rows, other devices' hints, and the rows that predictions use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Protocol as Interface

from convoy.engines.base import Engine
from convoy.measurement.protocol import Protocol
from convoy.perfdb.row import Measurement, Status
from convoy.perfdb.time_columns import TimeColumns
from convoy.problem import EngineConfig, Problem, SubgraphProblem
from convoy.settings import Effort
from convoy.target import Target
from convoy.tune.criteria import Criteria
from convoy.tune.criteria_file import find_criteria
from convoy.tune.precision import depends_on_precision, reuse_rows
from convoy.tune.predict import CostModel, TimePredictor
from convoy.tune.transfer_hints import predicting_targets, related_targets
from convoy.tune.tuning_task import TuningTask
from convoy.tuning_profile import phase

SearchProgress = Callable[[int, int, str], None]
"""Called with (done, total, a description of the current problem)."""


class RowStore(Interface):
    """The part of a database that the search uses."""

    def lookup(self, problem: str, target: str, protocol: str, /) -> Sequence[Measurement]:
        """Rows of a problem on a target by a protocol."""
        ...

    def measured(self, problem: str, target: str, protocol: str, /) -> Sequence[Measurement]:
        """Those that need not be measured again."""
        ...

    def put(
        self, rows: Sequence[Measurement], texts: Mapping[str, str] = ..., /, *, targets: Sequence[Target] = ...
    ) -> object:
        """Store rows, subgraph texts, and the descriptions of targets."""
        ...

    def times(self, target: Target, protocols: Sequence[str], /) -> TimeColumns:
        """Times of good rows of this device and of related ones."""
        ...

    def targets(self) -> Mapping[str, Target]:
        """The described targets, by digest."""
        ...


def known_rows(
    problem: Problem, target: Target, equivalent: Sequence[Target], protocol: Protocol, database: RowStore
) -> list[Measurement]:
    """A problem's rows on a target, and on equivalent targets if it does not depend on precision settings."""
    own = database.measured(problem.key, target.digest, protocol.id)
    others = (
        []
        if depends_on_precision(problem)
        else [database.measured(problem.key, other.digest, protocol.id) for other in equivalent]
    )
    return reusable_rows(reuse_rows(own, chain.from_iterable(others), target), target)


def reusable_rows(rows: Iterable[Measurement], target: Target) -> list[Measurement]:
    """Rows that still hold on another day.

    A config that ran out of memory on a GPU may fit later: other processes may use less, or the limit may be higher
    (`Settings.tuning_memory_bytes`), and trying again costs little. On a CPU the system kills a process that takes too much
    memory, so the row is kept.
    """
    return [row for row in rows if target.device != "cuda" or row.status is not Status.OUT_OF_MEMORY]


def add_transfer_hints(tasks: Sequence[TuningTask], target: Target, protocol: Protocol, database: RowStore) -> None:
    """Give tasks the hints from related devices' rows, and from rows of earlier protocols."""
    related = related_targets(target, database.targets().values())
    sources = [(source, protocol.id) for source in related]
    sources += [(source, earlier) for earlier in protocol.earlier for source in (target, *related)]
    for task in tasks:
        for source, clock in sources:
            rows = database.lookup(task.problem.key, source.digest, clock)
            if rows and task.take_hints(rows, source, same_clock=clock == protocol.id):
                break


Floor = Callable[[Problem], float]
"""Microseconds of a direct, dense algorithm for a problem at the device's peak rates."""


def add_predictions(
    tasks: Sequence[TuningTask],
    source: PredictorSource,
    protocol: Protocol,
    report: SearchProgress,
    floor_of: Callable[[], Floor | None],
) -> int:
    """Add predicted times to the problems without a complete answer, from rows of other problems on related devices.

    Args:
        tasks: the problems.
        source: the rows.
        protocol: how they were measured.
        report: called with the progress.
        floor_of: gives the floors of problems, or None if they are not known; called only if something is predicted.

    Returns:
        The number of measurements that the predictions rest on.
    """
    known = 0
    unknown = [task for task in tasks if not task.is_known()]
    if unknown:
        report(0, len(tasks), "predicting from the database")
        measured = (task.rows[config] for task in tasks for config in task.measured)
        predictor, criteria = source.with_rows(measured)
        known = predictor.measurements
        floor = floor_of()
        with phase("predict"):
            for task in unknown:
                floor_us = floor(task.problem) if floor else 0.0
                task.predict(predictor, protocol.id, criteria, floor_us, source.related_rows(task.problem))
    report(len(tasks), len(tasks), "from the database")
    return known


def set_priors(tasks: Sequence[TuningTask], source: PredictorSource, protocol: Protocol, target: Target) -> None:
    """Choose by prediction what each task compiles first. Only on a GPU: there are several compilers to choose from."""
    if target.device != "cuda":
        return
    unknown = [t for t in tasks if t.needs_prior() and not t.is_done(protocol, Effort.QUICK)]
    if unknown:
        predictor, criteria = source.with_rows()
        with phase("predict"):
            for task in unknown:
                task.set_prior(predictor, criteria)


class PredictorSource:
    """The rows and criteria that predictions use: those of related devices, and the criteria beside the database.

    They are read once, and only if something is predicted.
    """

    def __init__(
        self, engines: Sequence[Engine], target: Target, protocol: Protocol, database: RowStore, path: Path | None
    ) -> None:
        self._models, self._database, self._path = cost_models(engines, target), database, path
        self._fusing = frozenset(engine.id for engine in engines if engine.fuses_subgraphs)
        self._estimating = frozenset(engine.id for engine in engines if engine.estimates_subgraphs)
        self._threaded = frozenset(engine.id for engine in engines if engine.builds_in_threads)
        self._target, self._protocol = target, protocol
        self._times: TimeColumns | None = None
        self._related: Sequence[Target] | None = None

    def related_rows(self, problem: Problem) -> Sequence[Measurement]:
        """Rows of a subgraph that predict, from the first device that has some, their times scaled (`Target.time_factor`).

        Of this device's rows those that were measured here (`RowStore.measured`) are left out: they hide no related device's.
        Rows of layers are among `with_rows`.
        """
        if not isinstance(problem, SubgraphProblem):
            return ()
        if self._related is None:
            self._related = predicting_targets(self._target, self._database.targets().values())
        for device in (self._target, *self._related):
            for protocol in (self._protocol.id, *self._protocol.earlier):
                key = (problem.key, device.digest, protocol)
                own = (
                    {row.config for row in self._database.measured(*key)}
                    if device == self._target
                    else set[EngineConfig]()
                )
                if rows := [row for row in self._database.lookup(*key) if row.config not in own]:
                    factor = device.time_factor(self._target)
                    return rows if factor == 1 else [replace(row, median_us=row.median_us * factor) for row in rows]
        return ()

    def with_rows(self, measured: Iterable[Measurement] = ()) -> tuple[TimePredictor, Criteria | None]:
        """A predictor made from the stored rows and the rows measured since, and the criteria."""
        if self._times is None:
            with phase("predict", "read rows"):
                self._times = self._database.times(self._target, (self._protocol.id, *self._protocol.earlier))
        with phase("predict", "fit"):
            new = TimeColumns.of(measured)
            times = TimeColumns.joined((self._times, new)) if len(new) else self._times
            predictor = TimePredictor(times, self._models, self._fusing, self._estimating, threaded=self._threaded)
            return predictor, find_criteria(self._target, self._path)


def cost_models(engines: Sequence[Engine], target: Target) -> CostModel:
    """The engines' cost models as one; None for a missing engine, another version, or a cost model that raises."""
    by_id = {engine.id: engine for engine in engines}

    def estimate(problem: Problem, config: EngineConfig) -> float | None:
        engine = by_id.get(config.engine)
        if engine is None or engine.version != config.version:
            return None
        try:
            return engine.estimate_us(problem, config.knobs, target)
        except Exception:  # a broken cost model counts as none
            return None

    return estimate
