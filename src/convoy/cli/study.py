"""convoy study: which convolution algorithm wins where, on this machine."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

import typer

from convoy.cli import options
from convoy.errors import InputError

if TYPE_CHECKING:
    from convoy.cli.progress import Bar
    from convoy.compare import Row, Run
    from convoy.compare.study import Study
    from convoy.compare.study_sweep import Point
    from convoy.perfdb import Database
    from convoy.problem import ConvProblem
    from convoy.settings import Settings
    from convoy.target import Target

    Kind = Callable[[ConvProblem], ConvProblem]

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
    batch: Annotated[
        int | None,
        typer.Option("--batch", help="Images of the nets of --strategies, by default 1. For layers: --base n=8."),
    ] = None,
    direction: Annotated[
        str, typer.Option("--direction", help="fprop, dgrad and wgrad, separated by commas.")
    ] = "fprop",
    engines: Annotated[
        str | None, typer.Option("--engines", help="Only these engines beside the baseline, separated by commas.")
    ] = None,
    dtype: options.Dtype = "fp32",
    numerics: options.Numerics = "as_torch",
    device: options.Device = None,
    effort: options.Effort = "quick",
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
    output: Annotated[
        Path,
        typer.Option("--output", "-o", help="The run file (JSON), by default study.json; the same command goes on."),
    ] = Path("study.json"),
    report: options.Report = None,
    again: Annotated[
        bool,
        typer.Option("--again", help="Begin the run file anew, whatever is in it; the database serves all the same."),
    ] = False,
    db: options.Db = None,
) -> None:
    """Measure convolution algorithms over swept layers, say where the winner changes, and learn criteria from it."""
    if seconds < 0:
        raise InputError("--seconds", seconds, "at least 0")
    names, nets, directions = options.words_of(engines), options.words_of(strategies), _directions(direction)
    _check_batch(batch, nets)
    settings = options.settings_from(numerics=numerics, effort=effort, only_engines=tuple(names) or None, db=db)
    options.check_outputs({"--output": output, "--report": report})
    target = options.pick_target(device, dtype)

    from convoy.compare.lock import claim
    from convoy.perfdb import Database

    about = {"dtype": dtype, "numerics": str(settings.numerics)}
    kinds = [partial(_of_kind, **about, direction=word) for word in directions]
    points = {
        "swept": _swept(sweep, base, kinds, target.device, only=layers is None and not nets),
        "listed": _listed(layers, kinds),
    }
    request = {
        "command": "study", "sweep": sweep or "", "base": base, "layers": layers.name if layers else "",
        "strategies": nets, "direction": directions, "engines": names, **about, "effort": str(settings.effort),
        "batch": batch or 0, "energy": energy,
    }  # fmt: skip
    with claim(target, options.tell) as notes, Database.open(settings.db) as database:
        for note in database.warnings:
            options.tell(f"warning: {note}")
        run = _start(target, settings, request, output, notes, again=again)
        with _Session(target, settings, database, run, output, seconds) as session:
            session.layers(points, energy=energy)
            session.nets(nets, dtype, batch)
        notes.look()
        session.note(notes)
        session.tell(points, criteria=not no_criteria)
    options.write_report(session.run, report)


def _check_batch(batch: int | None, nets: Sequence[str]) -> None:
    if batch is not None and batch < 1:
        raise InputError("--batch", batch, "an integer of at least 1")
    if batch is not None and not nets:
        raise InputError("--batch", batch, "--strategies beside it", "For swept layers there is --base n=8.")


def _start(
    target: Target, settings: Settings, request: dict[str, Any], path: Path, notes: Sequence[str], *, again: bool
) -> Run:
    """The run to go on with: rows of an earlier one of the same request stay until they are measured again."""
    from convoy.compare import Run
    from convoy.compare.manifest import make_manifest
    from convoy.compare.runfile import resumed
    from convoy.measurement import protocol_for

    protocol = protocol_for(settings.effort, target.device).id
    manifest = make_manifest(device=target.device, protocol=protocol, request=request, notes=notes)
    return resumed(path, Run("study", manifest), again=again)


def _directions(text: str) -> list[str]:
    from convoy.problem.conv import DIRECTIONS

    found = options.words_of(text)
    for word in found or [text]:
        if word not in DIRECTIONS or found.count(word) > 1:
            raise InputError("--direction", word, "each at most once of " + ", ".join(DIRECTIONS))
    return found


def _swept(sweep: str | None, base: str, kinds: Sequence[Kind], device: str, *, only: bool) -> list[Point]:
    """The swept points: all sweeps where nothing else was asked for."""
    from convoy.compare.study_sweep import parse_base, sweep_points

    names = options.words_of(SWEPT if sweep is None and only else sweep)
    middle = parse_base(base)
    return [point for kind in kinds for point in sweep_points(names, kind(middle), device)]


def _listed(path: Path | None, kinds: Sequence[Kind]) -> list[Point]:
    from convoy.compare.study_sweep import BASE, read_layers

    return [] if path is None else [point for kind in kinds for point in read_layers(path, kind(BASE))]


def _of_kind(problem: ConvProblem, *, dtype: str, numerics: str, direction: str) -> ConvProblem:
    """The same sizes in the types, rounding and direction that were asked for."""
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
        run: Run,
        output: Path,
        seconds: float = 0.0,
    ) -> None:
        from convoy.cli.progress import Bar
        from convoy.compare.study import Study
        from convoy.pipeline.stages import competing_engines, make_runner

        self.target, self.settings, self.database, self.output = target, settings, database, output
        self.run = run
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
            self._take(rows)

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

    def nets(self, names: Sequence[str], dtype: str, batch: int | None = None) -> None:
        """Compare strategies on whole nets."""
        if not names:
            return
        from convoy.compare.study_strategies import strategies
        from convoy.pipeline.stages import capture_net

        for name in names:
            if self._late(name):
                continue
            module = options.load(name, None, dtype, self.target.device)
            args = options.example(module, name, None, batch, None, dtype, self.target.device)
            with options.fitting(module, args):
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
        """Take what makes the figures doubtful into the file."""
        from convoy.compare.lock import noted

        self.run = noted(self.run, notes)
        if self.run.rows:
            self._keep()

    def _keep(self) -> None:
        from convoy.compare import write

        write(self.run, self.output)

    def tell(self, points: dict[str, list[Point]], *, criteria: bool) -> None:
        """Print what was found; learn criteria and keep them beside the database."""
        from convoy.compare.study_lines import (
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
            typer.echo(line)
        if criteria and layers:
            self._learn(points)
        typer.echo(self.study.counted())
        if self.left:
            typer.echo(f"no time was left for {'; '.join(self.left)}: the same command goes on")
        if self.run.rows:
            typer.echo(f"run: {self.output}")

    def _learn(self, points: dict[str, list[Point]]) -> None:
        from convoy.compare import study_criteria
        from convoy.compare.manifest import commit
        from convoy.measurement.criteria_file import criteria_json, user_file
        from convoy.plan.file import write_text

        found = self.study.learn(commit())
        checked = "" if found is None else self.study.check(points["swept"], points["listed"])
        about = study_criteria.to_dict(found, checked)
        self.run = replace(self.run, manifest={**self.run.manifest, study_criteria.FIELD: about})
        self._keep()
        if found is None:
            typer.echo(study_criteria.check_line(about))
            return
        path = user_file(self.target, self.settings.db)
        if not self.database.in_memory:
            write_text(path, criteria_json(found), "criteria")
        typer.echo(f"criteria, from {found.problems} layers of this machine ({path}):")
        for line in about["rules"]:
            typer.echo(f"  {line}")
        typer.echo(study_criteria.check_line(about))
