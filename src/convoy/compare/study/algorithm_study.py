"""Convolution algorithms over swept structure, through the ordinary search and its database: the study of the third paper.

Every engine that can do a layer is measured on it (`convoy.tune.search`), in every memory format; an algorithm's row is
the fastest of its engines, knobs and formats. A second run takes everything from the database, and an interrupted one goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from convoy.compare.runs.rows import Figure, Row
from convoy.compare.study.learn_criteria import CriteriaCheck, MeasuredLayer, check, known_layers, learn
from convoy.compare.study.study_sweep import SweepPoint
from convoy.compare.study.study_winners import TIME
from convoy.engines.activation_sparsity import sparsity_percent
from convoy.engines.manifest import BASELINE, load_engine
from convoy.measurement import Runner, protocol_for
from convoy.perfdb import Database, Measurement
from convoy.problem import Knobs
from convoy.settings import Settings
from convoy.target import Target
from convoy.tune import SearchResult, search
from convoy.tune.criteria import Criteria

Report = Callable[[int, int, str], None]

Joules = Callable[[Measurement], float | None]
"""Joules of one launch of a row's config; None where unknown."""

SPECIAL: Final = {"fft_tiled": "tiled fft", "pruned": "pruned"}
"""Algorithms that an engine's id tells better than its family."""

SKIPPING: Final = "zero-skipping"
"""Suffix of the algorithm of an engine that skips zeros, where its config is for an input with zeros."""

NOISY: Final = 0.10
"""A relative spread above this is noise; the search takes its samples in turn and drops rounds that were slow for all."""

NOT_MEASURED: Final = (
    "not measured: effort none takes times from the database alone, and it has none; use --effort quick"
)
"""Reason of an algorithm for which only predictions are known."""

LEAST_LAYERS: Final = 20
"""Layers with a choice from which on criteria are learned: with fewer there is nothing to split."""


def algorithm_of(engine: str, extra: tuple[str, ...] = (), knobs: Knobs | None = None) -> str:
    """The algorithm of an engine, in the field's words.

    Args:
        engine: its id.
        extra: extra engines as `id=module:Class`.
        knobs: of its config: an engine that skips zeros runs its dense path where none are expected, which is of its family.
    """
    if knobs is not None and sparsity_percent(knobs):
        return SKIPPING
    special = SPECIAL.get(engine.partition(".")[0])
    return special or load_engine(engine, extra).family.replace("_", " ")


@dataclass(slots=True)
class AlgorithmStudy:
    """A study on its way.

    Attributes:
        target: the device.
        settings: numerics, effort and engines.
        database: known rows; new rows are added.
        runner: measures candidates.
        engine_ids: of the engines that compete.
        joules: energy of a launch; None: it is not asked for.
        measured: candidates measured now.
        from_database: candidates that were known.
        problems: problems that were asked for.
        predicted: those of them whose times are predicted, because effort `none` measures nothing; no row has such a time.
    """

    target: Target
    settings: Settings
    database: Database
    runner: Runner
    engine_ids: Sequence[str]
    joules: Joules | None = None
    measured: int = 0
    from_database: int = 0
    problems: int = 0
    predicted: int = 0
    _layers: dict[str, list[Measurement]] = field(default_factory=dict[str, list[Measurement]])

    def rows(self, points: Sequence[SweepPoint], report: Report | None = None) -> list[Row]:
        """Measure some points together and return the row of each algorithm; a failure is a row too."""
        problems = [problem for point in points for problem in point.problems()]
        found = search(
            problems,
            engine_ids=self.engine_ids,
            target=self.target,
            settings=self.settings,
            database=self.database,
            runner=self.runner,
            on_progress=report,
        )
        self.count(found)
        return [row for point in points for row in self._point(point, found)]

    def count(self, found: SearchResult) -> None:
        """Add the numbers of measured, known and predicted candidates."""
        self.measured += found.measured
        self.from_database += found.from_database
        self.problems += sum(1 for rows in found.rows.values() if rows)
        self.predicted += found.predicted

    def counted(self) -> str:
        """The numbers of measured, known and predicted candidates, in words."""
        known = f"{self.measured} candidates measured, {self.from_database} from the database"
        return known + (f", {self.predicted} of {self.problems} problems predicted" if self.predicted else "")

    def _point(self, point: SweepPoint, found: SearchResult) -> list[Row]:
        by_algorithm: dict[str, list[tuple[str, Measurement]]] = {}
        refused: dict[str, dict[str, str]] = {}
        unmeasured: set[str] = set()
        extra = self.settings.engines
        for problem in point.problems():
            every = found.rows.get(problem.key, ())
            measured = [row for row in every if not row.predicted]
            unmeasured.update(
                algorithm_of(row.config.engine, extra, row.config.knobs) for row in every if row.predicted
            )
            self._layers[problem.key] = measured
            for row in measured:
                by_algorithm.setdefault(algorithm_of(row.config.engine, extra, row.config.knobs), []).append(
                    (problem.layout, row)
                )
            for engine, reason in found.refusals.get(problem.key, {}).items():
                refused.setdefault(algorithm_of(engine, extra), {})[f"{engine}, {problem.layout}"] = reason
        rows = [
            _row(point, name, status="unsupported", reason=NOT_MEASURED)
            for name in sorted(unmeasured - by_algorithm.keys())
        ]
        rows += [self._best(point, name, own) for name, own in by_algorithm.items()]
        rows += [
            _refused(point, name, why) for name, why in refused.items() if name not in by_algorithm.keys() | unmeasured
        ]
        return sorted(rows, key=_by_time)

    def _best(self, point: SweepPoint, algorithm: str, rows: Sequence[tuple[str, Measurement]]) -> Row:
        good = sorted((item for item in rows if item[1].ok), key=lambda item: item[1].median_us)
        if not good:
            _, row = rows[0]
            return _row(point, algorithm, status=str(row.status), reason=f"{row.config.engine}: {row.reason}")
        layout, row = good[0]
        figures = [
            Figure(TIME, "us", row.median_us, row.median_us - row.spread_us, row.median_us + row.spread_us),
            Figure.once("workspace_bytes", "B", row.workspace_bytes),
            Figure.once("resident_bytes", "B", row.resident_bytes),
            Figure.once("rel_l2_error", "1", row.error),
        ]
        energy = self.joules(row) if self.joules is not None else None
        figures += [Figure.once("energy_uj", "uJ", 1e6 * energy)] if energy is not None else []
        return _row(
            point,
            algorithm,
            setting=f"{row.config.engine} [{row.config.knobs}] {layout}",
            figures=tuple(figures),
            noisy=row.spread_us > NOISY * row.median_us,
            detail={
                "engine": row.config.engine,
                "knobs": str(row.config.knobs),
                "layout": layout,
                "problem": row.problem,
                "flops": point.problem.flops,
                "candidates": len(rows),
                "samples": row.samples,
            },
        )

    def learn(self, commit: str = "") -> Criteria | None:
        """Criteria from everything that the database knows of this target's layers; None where that is too little."""
        protocol = protocol_for(self.settings.effort, self.target.device).id
        rows = self.database.good_layers(self.target.digest, protocol)
        if sum(layer.is_choice() for layer in known_layers(rows)) < LEAST_LAYERS:
            return None
        return learn(rows, self.target, protocol=protocol, commit=commit)

    def check(self, learned_on: Sequence[SweepPoint], checked_on: Sequence[SweepPoint]) -> CriteriaCheck | str:
        """Criteria from some points alone, on other points; where one or the other is too little, a line that says so."""
        if not checked_on or not learned_on:
            return "to check them takes swept layers to learn from (--sweep) and others to check them on (--layers)"
        rows = [row for point in learned_on for row in self._of(point)]
        choices = sum(layer.is_choice() for layer in known_layers(rows))
        if choices < LEAST_LAYERS:
            return f"too few swept layers to check them: {choices} were measured with two engines, {LEAST_LAYERS} are needed"
        protocol = protocol_for(self.settings.effort, self.target.device).id
        swept = {problem.key for point in learned_on for problem in point.problems()}
        unseen = [row for point in checked_on for row in self._of(point) if row.problem not in swept]
        layers: list[MeasuredLayer] = [layer for layer in known_layers(unseen) if layer.is_choice()]
        if not layers:
            return "no listed layer to check them on: none was measured with two engines that was not swept too"
        return check(learn(rows, self.target, protocol=protocol), layers, BASELINE)

    def _of(self, point: SweepPoint) -> list[Measurement]:
        return [row for problem in point.problems() for row in self._layers.get(problem.key, ())]


def _refused(point: SweepPoint, algorithm: str, why: Mapping[str, str]) -> Row:
    reasons = "; ".join(f"{who}: {reason}" for who, reason in why.items())
    return _row(point, algorithm, status="unsupported", reason=reasons)


def _row(point: SweepPoint, algorithm: str, **values: Any) -> Row:
    problem = point.problem
    return Row(
        subject=point.subject,
        provider=algorithm,
        mode=problem.direction,
        batch=max(1, problem.n),
        dtype=problem.x_dtype,
        numerics=problem.numerics,
        axes=point.axes,
        **values,
    )


def _by_time(row: Row) -> float:
    figure = row.figure(TIME)
    return figure.p50 if figure is not None else float("inf")


def best_by_point(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows of one question together, the fastest first, failures last; questions in their order."""
    found: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(row.question, []).append(row)
    return [sorted(own, key=_by_time) for own in found.values()]
