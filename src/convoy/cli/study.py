"""convoy study: which convolution algorithm wins where, on this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from convoy.cli import interrupt, options
from convoy.errors import InputError

if TYPE_CHECKING:
    from convoy.compare import Run
    from convoy.compare.study.study_sweep import Point
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
    trust: options.Trust = False,
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

    from convoy.cli.study_session import StudySession
    from convoy.compare.runs.device_lock import claim
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
    interrupt.unwinds()  # writes the run file
    with claim(target, options.tell) as notes, Database.open(settings.db) as database:
        for note in database.warnings:
            options.tell(f"warning: {note}")
        run = _start(target, settings, request, output, notes, again=again)
        with StudySession(target, settings, database, run, output, seconds) as session:
            session.layers(points, energy=energy)
            session.nets(nets, dtype, batch, trust=trust)
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
    from convoy.compare.runs.manifest import make_manifest
    from convoy.compare.runs.runfile import resumed
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
    from convoy.compare.study.study_sweep import parse_base, sweep_points

    names = options.words_of(SWEPT if sweep is None and only else sweep)
    middle = parse_base(base)
    return [point for kind in kinds for point in sweep_points(names, kind(middle), device)]


def _listed(path: Path | None, kinds: Sequence[Kind]) -> list[Point]:
    from convoy.compare.study.study_sweep import BASE, read_layers

    return [] if path is None else [point for kind in kinds for point in read_layers(path, kind(BASE))]


def _of_kind(problem: ConvProblem, *, dtype: str, numerics: str, direction: str) -> ConvProblem:
    """The same sizes in the types, rounding and direction that were asked for."""
    types = dict.fromkeys(("x_dtype", "weight_dtype", "y_dtype"), dtype)
    return replace(problem, **types, numerics=numerics, direction=direction)
