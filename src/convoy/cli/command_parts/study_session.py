"""A running study: it measures while time is left, writes the run file after each curve, and prints the results at the end."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from convoy.cli.options import inputs, values
from convoy.cli.output.lines import say
from convoy.errors import InputError

if TYPE_CHECKING:
    from convoy.cli.output.progress import Bar
    from convoy.compare import Row, Run
    from convoy.compare.study.algorithm_study import AlgorithmStudy
    from convoy.compare.study.study_sweep import SweepPoint
    from convoy.perfdb import Database
    from convoy.settings import Settings
    from convoy.target import Target


class _OutOfTimeError(Exception):
    """Raised into a search when its time is up."""


class StudySession:
    """A running study: the run file holds all finished curves, also after an interrupt."""

    def __init__(
        self,
        target: Target,
        settings: Settings,
        database: Database,
        run: Run,
        output: Path,
        seconds: float = 0.0,
    ) -> None:
        from convoy.cli.output.progress import Bar
        from convoy.compare.study.algorithm_study import AlgorithmStudy
        from convoy.engines.competition import competing_engines
        from convoy.pipeline.measure_net import make_runner

        self.target, self.settings, self.database, self.output = target, settings, database, output
        self.run = run
        self._bar: Bar = Bar()
        self._deadline = time.monotonic() + seconds if seconds else math.inf
        self.left: list[str] = []
        self._runner = make_runner(target, settings)
        self.study: AlgorithmStudy = AlgorithmStudy(
            target, settings, database, self._runner, competing_engines(settings, published=True)
        )

    def __enter__(self) -> Self:
        self._bar.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._runner.close()
        self._bar.__exit__(kind, error, trace)

    def layers(self, points: dict[str, list[SweepPoint]], *, energy: bool) -> None:
        """Measure swept and listed layers, curve by curve."""
        if energy:
            from convoy.compare.study.study_energy import gpu_counter, launch_joules

            counter = gpu_counter() if self.target.device == "cuda" else None
            if counter is None:
                raise InputError("--energy", self.target.name, "an NVIDIA GPU whose driver counts energy")
            self.study.joules = launch_joules(self.target, counter, self.settings.engines)
        curves: dict[tuple[str, str], list[SweepPoint]] = {}
        for point in (*points["swept"], *points["listed"]):
            subject = point.subject if point.axes else point.subject.partition(":")[0]
            curves.setdefault((subject, point.problem.direction), []).append(point)
        for (subject, direction), own in curves.items():
            if self._late(f"{subject}, {direction}"):
                continue
            try:
                rows = self.study.rows(own, lambda done, total, message: self._watch(message, done, total))
            except _OutOfTimeError:
                self._late(f"{subject}, {direction}")
                continue
            self._take(rows)

    def _watch(self, message: str, done: int, total: int) -> None:
        """Show the progress; when the time is up, the measurements stay in the database."""
        self._bar(message, done, total)
        if done < total and time.monotonic() > self._deadline:
            raise _OutOfTimeError(message)

    def _late(self, what: str) -> bool:
        """Whether the time is up; work that is left out for that reason is remembered."""
        late = time.monotonic() > self._deadline
        if late:
            self.left.append(what)
        return late

    def nets(self, names: Sequence[str], dtype: str, batch: int | None = None, *, trust: bool = False) -> None:
        """Compare strategies on whole nets."""
        if not names:
            return
        from convoy.compare.study.study_strategies import strategies
        from convoy.pipeline.net import capture_net

        for name in names:
            if self._late(name):
                continue
            module = values.load(name, None, dtype, self.target.device, trust=trust)
            args = inputs.example(module, name, None, batch, None, dtype, self.target.device)
            with inputs.fitting(module, args):
                net = capture_net(name, module, args, {}, self.settings, self.target)
            try:
                rows, found = strategies(net, self.settings, self.database, self._watch)
            except _OutOfTimeError:
                self._late(name)
                continue
            self.study.count(found)
            self._take(rows)

    def _take(self, rows: Sequence[Row]) -> None:
        """Keep rows in the place of those that the file had of the same questions: an algorithm that is gone leaves none."""
        questions, keys = {row.question for row in rows}, {row.key for row in rows}
        kept = tuple(row for row in self.run.rows if row.question not in questions or row.key in keys)
        self.run = replace(self.run, rows=kept)
        for row in rows:
            self.run = self.run.with_row(row)
        self._keep()

    def note(self, notes: Sequence[str]) -> None:
        """Write warnings about the figures into the file."""
        from convoy.compare.runs.device_lock import noted

        self.run = noted(self.run, notes)
        if self.run.rows:
            self._keep()

    def _keep(self) -> None:
        from convoy.compare import write

        write(self.run, self.output)

    def tell(self, points: dict[str, list[SweepPoint]], *, criteria: bool) -> None:
        """Print the results; learn criteria and write them next to the database."""
        from convoy.compare.study.study_lines import (
            STRATEGY_HEADS,
            STRATEGY_NUMBERS,
            layer_table,
            strategy_notes,
            strategy_table,
            winners,
        )
        from convoy.report import print_table

        nets = [row for row in self.run.rows if row.mode == "inference"]
        layers = [row for row in self.run.rows if row.mode != "inference"]
        if layers:
            table = layer_table(layers)
            print_table(table.heads, [[cell.text for cell in row] for row in table.rows], numbers=table.numbers)
        if nets:
            print_table(STRATEGY_HEADS, strategy_table(nets), numbers=STRATEGY_NUMBERS)
        for line in (*strategy_notes(nets), *winners(layers)):
            say(line)
        if criteria and layers:
            self._learn(points)
        say(self.study.counted())
        if self.left:
            say(f"no time was left for {'; '.join(self.left)}: the same command goes on")
        if self.run.rows:
            say(f"run: {self.output}")

    def _learn(self, points: dict[str, list[SweepPoint]]) -> None:
        from convoy.compare.runs.manifest import commit
        from convoy.compare.study import study_criteria
        from convoy.plan.file import write_text
        from convoy.tune.criteria_file import criteria_json, user_file

        found = self.study.learn(commit())
        checked = "" if found is None else self.study.check(points["swept"], points["listed"])
        about = study_criteria.to_dict(found, checked)
        self.run = replace(self.run, manifest={**self.run.manifest, study_criteria.FIELD: about})
        self._keep()
        if found is None:
            say(study_criteria.check_line(about))
            return
        path = user_file(self.target, self.settings.db)
        if not self.database.in_memory:
            write_text(path, criteria_json(found), "criteria")
        say(f"criteria, from {found.problems} layers of this machine ({path}):")
        for line in about["rules"]:
            say(f"  {line}")
        say(study_criteria.check_line(about))
