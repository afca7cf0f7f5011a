"""convoy study: which convolution algorithm wins where, on this machine."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

import typer

from convoy.cli import options
from convoy.errors import InputError

if TYPE_CHECKING:
    from convoy.cli.progress import Bar
    from convoy.compare import Run
    from convoy.compare.study import Study
    from convoy.compare.study_sweep import Point
    from convoy.perfdb import Database
    from convoy.settings import Settings
    from convoy.target import Target

SWEPT = "batch,channels,filters,size,kernel,stride"


def study(
    sweep: Annotated[
        str | None,
        typer.Option(
            "--sweep", help=f"Sizes to sweep, separated by commas: {SWEPT} (these are the default), sparsity."
        ),
    ] = None,
    layers: Annotated[Path | None, typer.Option("--layers", help="A CSV file of layers, as in bench/layers.")] = None,
    base: Annotated[
        str, typer.Option("--base", help="What stays while a size is swept: c=64,h=56,w=56 (names of ConvProblem).")
    ] = "",
    strategies: Annotated[
        str | None, typer.Option("--strategies", help="Nets, separated by commas, to compare strategies on.")
    ] = None,
    direction: Annotated[
        str, typer.Option("--direction", help="fprop, dgrad and wgrad, separated by commas.")
    ] = "fprop",
    engines: Annotated[
        str | None, typer.Option("--engines", help="Only these engines beside the baseline, separated by commas.")
    ] = None,
    dtype: options.Dtype = "fp32",
    numerics: Annotated[
        str, typer.Option("--numerics", help="strict, as_torch or half: which rounding is allowed.")
    ] = "as_torch",
    device: options.Device = None,
    effort: Annotated[str, typer.Option("--effort", help="none (database only), quick or full.")] = "quick",
    energy: Annotated[
        bool,
        typer.Option("--energy", help="Take the energy of each algorithm too: a second for each, on an NVIDIA GPU."),
    ] = False,
    seconds: Annotated[
        float,
        typer.Option("--seconds", help="Measure nothing new after so long; the same command goes on. 0: no limit."),
    ] = 0.0,
    no_criteria: Annotated[
        bool, typer.Option("--no-criteria", help="Do not learn criteria for `--effort none` from what was measured.")
    ] = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the run to this JSON file.")] = None,
    report: Annotated[Path | None, typer.Option("--report", help="Write the HTML page to this file.")] = None,
    db: options.Db = None,
) -> None:
    """Measure convolution algorithms over swept layers, say where the winner changes, and learn criteria from it."""
    if seconds < 0:
        raise InputError("--seconds", seconds, "at least 0")
    names = _words(engines)
    settings = options.settings_from(
        numerics=numerics, effort=effort, only_engines=tuple(names) if names else None, db=db
    )
    options.check_outputs({"--output": output, "--report": report})
    device = options.pick_device(device)

    from convoy.compare.lock import device_lock, others_at_work
    from convoy.measurement import check_dtype, detect_target
    from convoy.perfdb import Database

    target = detect_target(device)
    check_dtype(target, dtype)
    directions = _directions(direction)
    nets = _words(strategies)
    points = {
        "swept": _swept(
            sweep, base, dtype, str(settings.numerics), device, directions, only=layers is None and not nets
        ),
        "listed": _listed(layers, dtype, str(settings.numerics), directions),
    }
    request = {
        "command": "study", "sweep": sweep or "", "base": base, "layers": layers.name if layers else "",
        "strategies": nets, "direction": directions, "engines": names, "dtype": dtype,
        "numerics": str(settings.numerics), "effort": str(settings.effort),
    }  # fmt: skip
    with device_lock(target) as warning, Database.open(settings.db) as database:
        notes = [note for note in (warning, others_at_work(target)) if note]
        for note in (*notes, *database.warnings):
            typer.echo(f"convoy: warning: {note}", err=True)
        session = _Session(target, settings, database, request, output, notes, seconds)
        with session:
            session.layers(points, energy=energy)
            session.nets(nets, dtype)
        session.tell(points, criteria=not no_criteria)
    if report is not None:
        _write_report(session.run, report)


def _write_report(run: Run, path: Path) -> None:
    from convoy.compare.page import sheet_of
    from convoy.report.sheet import write_sheet

    write_sheet(sheet_of([run]), path)
    typer.echo(f"report: {path}")


def _words(text: str | None) -> list[str]:
    return [word.strip() for word in (text or "").split(",") if word.strip()]


def _directions(text: str) -> list[str]:
    from convoy.problem.conv import DIRECTIONS

    found = _words(text)
    for word in found or [text]:
        if word not in DIRECTIONS or found.count(word) > 1:
            raise InputError("--direction", word, "each at most once of " + ", ".join(DIRECTIONS))
    return found


def _swept(
    sweep: str | None, base: str, dtype: str, numerics: str, device: str, directions: Sequence[str], *, only: bool
) -> list[Point]:
    """The swept points: all sweeps where nothing else was asked for."""
    from convoy.compare.study_sweep import parse_base, sweep_points

    names = _words(sweep) if sweep is not None else _words(SWEPT) if only else []
    like = [_like(parse_base(base), dtype, numerics, word) for word in directions]
    return [point for problem in like for point in sweep_points(names, problem, device)]


def _listed(path: Path | None, dtype: str, numerics: str, directions: Sequence[str]) -> list[Point]:
    from convoy.compare.study_sweep import BASE, read_layers

    if path is None:
        return []
    return [point for word in directions for point in read_layers(path, _like(BASE, dtype, numerics, word))]


def _like(problem: Any, dtype: str, numerics: str, direction: str) -> Any:
    from dataclasses import replace

    types = dict.fromkeys(("x_dtype", "weight_dtype", "y_dtype"), dtype)
    return replace(problem, **types, numerics=numerics, direction=direction)


class _OutOfTimeError(Exception):
    """Raised into a search when its time is up."""


class _Session:
    """A study on its way: what was found so far stands in the file after each curve, when interrupted too."""

    def __init__(
        self,
        target: Target,
        settings: Settings,
        database: Database,
        request: dict[str, Any],
        output: Path | None,
        notes: Sequence[str],
        seconds: float = 0.0,
    ) -> None:
        from convoy.cli.progress import Bar
        from convoy.compare import Run
        from convoy.compare.manifest import make_manifest
        from convoy.compare.study import Study
        from convoy.measurement import protocol_for
        from convoy.pipeline.stages import competing_engines, make_runner

        self.target, self.settings, self.database, self.output = target, settings, database, output
        protocol = protocol_for(settings.effort, target.device).id
        manifest = make_manifest(device=target.device, protocol=protocol, request=request, notes=notes)
        self.run: Run = Run("study", manifest)
        self._bar: Bar = Bar()
        self._deadline = time.monotonic() + seconds if seconds else math.inf
        self.left: list[str] = []
        self._runner = make_runner(target, settings)
        self.study: Study = Study(target, settings, database, self._runner, competing_engines(settings))

    def __enter__(self) -> Self:
        self._bar.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._runner.close()
        self._bar.__exit__(*error)

    def layers(self, points: dict[str, list[Point]], *, energy: bool) -> None:
        """Measure swept and listed layers, curve by curve."""
        if energy:
            from convoy.compare.study_energy import gpu_counter, launch_joules

            counter = gpu_counter() if self.target.device == "cuda" else None
            if counter is None:
                raise InputError("--energy", self.target.name, "an NVIDIA GPU whose driver counts energy")
            self.study.joules = launch_joules(self.target, counter, self.settings.engines)
        curves: dict[tuple[str, str], list[Point]] = {}
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
            for row in rows:
                self.run = self.run.with_row(row)
            self._keep()

    def _watch(self, message: str, done: int, total: int) -> None:
        """Show how far it is; what was measured stays in the database when the time is up."""
        self._bar(message, done, total)
        if done < total and time.monotonic() > self._deadline:
            raise _OutOfTimeError(message)

    def _late(self, what: str) -> bool:
        """Whether the time is up; what is not done for that is remembered."""
        late = time.monotonic() > self._deadline
        if late:
            self.left.append(what)
        return late

    def nets(self, names: Sequence[str], dtype: str) -> None:
        """Compare strategies on whole nets."""
        if not names:
            return
        from convoy.compare.study_strategies import strategies
        from convoy.pipeline.stages import capture_net

        for name in names:
            if self._late(name):
                continue
            module = options.load(name, None, dtype, self.target.device)
            args = options.example(module, name, None, None, None, dtype, self.target.device)
            with options.fitting(module, args):
                net = capture_net(name, module, args, {}, self.settings, self.target)
            try:
                rows, found = strategies(net, self.settings, self.database, self._watch)
            except _OutOfTimeError:
                self._late(name)
                continue
            self.study.measured += found.measured
            self.study.from_database += found.from_database
            for row in rows:
                self.run = self.run.with_row(row)
            self._keep()

    def _keep(self) -> None:
        from convoy.compare import write

        if self.output is not None:
            write(self.run, self.output)

    def tell(self, points: dict[str, list[Point]], *, criteria: bool) -> None:
        """Print what was found; learn criteria and keep them beside the database."""
        from convoy.compare.study_lines import (
            HEADS,
            NUMBERS,
            STRATEGY_HEADS,
            STRATEGY_NUMBERS,
            strategy_table,
            table,
            winners,
        )
        from convoy.report import print_table

        nets = [row for row in self.run.rows if row.mode == "inference"]
        layers = [row for row in self.run.rows if row.mode != "inference"]
        if layers:
            print_table(HEADS, table(layers), numbers=NUMBERS)
        if nets:
            print_table(STRATEGY_HEADS, strategy_table(nets), numbers=STRATEGY_NUMBERS)
        for line in winners(layers):
            typer.echo(line)
        if criteria and layers:
            self._learn(points)
        typer.echo(f"{self.study.measured} candidates measured, {self.study.from_database} from the database")
        if self.left:
            typer.echo(f"no time was left for {'; '.join(self.left)}: the same command goes on")
        if self.output is not None:
            typer.echo(f"run: {self.output}")

    def _learn(self, points: dict[str, list[Point]]) -> None:
        from convoy.compare.manifest import commit
        from convoy.measurement.criteria import rules
        from convoy.measurement.criteria_file import criteria_json, user_file
        from convoy.plan.file import write_text

        found = self.study.learn(commit())
        if found is None:
            typer.echo("criteria: too few layers with a choice in the database to learn from")
            return
        path = user_file(self.target, self.settings.db)
        if not self.database.in_memory:
            write_text(path, criteria_json(found), "criteria")
        typer.echo(f"criteria, from {found.problems} layers of this machine ({path}):")
        for line in rules(found):
            typer.echo(f"  {line}")
        checked = self.study.check(points["swept"], points["listed"])
        if checked is not None:
            typer.echo(f"criteria from the swept layers alone, on the listed ones that were not swept: {checked}")
