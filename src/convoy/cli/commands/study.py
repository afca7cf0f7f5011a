"""convoy study: which convolution algorithm wins where, on this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from convoy.cli import interrupt
from convoy.cli.options import shared, values
from convoy.cli.options import study as given
from convoy.cli.output import kept
from convoy.cli.output.files import check_outputs, write_report
from convoy.cli.output.lines import tell
from convoy.errors import InputError, unknown_name

if TYPE_CHECKING:
    from convoy.compare import Run
    from convoy.compare.study.study_sweep import SweepPoint
    from convoy.problem import ConvProblem
    from convoy.settings import Settings
    from convoy.target import Target

    Kind = Callable[[ConvProblem], ConvProblem]


def study(
    sweep: given.Sweep = None,
    layers: given.Layers = None,
    base: given.Base = "",
    strategies: given.Strategies = None,
    direction: given.Direction = "fprop",
    batch: given.Batch = None,
    dtype: shared.Dtype = "fp32",
    device: shared.Device = None,
    trust: shared.Trust = False,
    numerics: shared.Numerics = "as_torch",
    effort: shared.Effort = "quick",
    no_criteria: given.NoCriteria = False,
    db: shared.Db = None,
    only_engines: shared.OnlyEngines = None,
    energy: given.Energy = False,
    seconds: given.Seconds = 0.0,
    output: given.Output = Path("study.json"),
    report: shared.Report = None,
    again: given.Again = False,
) -> None:
    """Time convolution algorithms over layer sizes, say where the fastest changes, and learn rules for `--effort none`."""
    from convoy.engines.competition import competing_engines

    if seconds < 0:
        raise InputError("--seconds", seconds, "at least 0")
    names, nets, directions = values.words_of(only_engines), values.words_of(strategies), _directions(direction)
    _check_batch(batch, nets)
    settings = values.settings_from(numerics=numerics, effort=effort, only_engines=names or None, db=db)
    check_outputs({"--out": output, "--report": report})
    target = values.pick_target(device, dtype)
    competing_engines(settings)  # raises InputError for names that are none, before the device is claimed
    for net in nets:
        values.load(net, None, dtype, target.device, trust=trust)

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
    asked = _Asked(target, settings, request, output, seconds, points, again, not no_criteria)
    write_report(_measure(asked, nets, batch, trust=trust), report)


@dataclass(frozen=True, slots=True)
class _Asked:
    """A study as the options ask for it."""

    target: Target
    settings: Settings
    request: dict[str, Any]
    output: Path
    seconds: float
    points: dict[str, list[SweepPoint]]
    again: bool
    criteria: bool


def _measure(asked: _Asked, nets: Sequence[str], batch: int | None, *, trust: bool) -> Run:
    """Measure layers and nets, and print the results."""
    from convoy.cli.command_parts.study_session import StudySession
    from convoy.compare.runs.device_lock import claim
    from convoy.perfdb import Database

    target, settings = asked.target, asked.settings
    kept.run_file(asked.output)
    interrupt.unwinds()  # writes the run file
    with claim(target, tell) as notes, Database.open(settings.db) as database:
        for note in database.warnings:
            tell(f"warning: {note}")
        run = _start(target, settings, asked.request, asked.output, notes, again=asked.again)
        with StudySession(target, settings, database, run, asked.output, asked.seconds) as session:
            session.layers(asked.points, energy=asked.request["energy"])
            session.nets(nets, asked.request["dtype"], batch, trust=trust)
        notes.look()
        session.note(notes)
        session.tell(asked.points, criteria=asked.criteria)
    return session.run


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

    found = values.words_of(text)
    for word in found or [text]:
        if word not in DIRECTIONS:
            raise unknown_name("--direction", word, DIRECTIONS)
        if found.count(word) > 1:
            raise InputError("--direction", word, "each direction at most once")
    return found


def _swept(sweep: str | None, base: str, kinds: Sequence[Kind], device: str, *, only: bool) -> list[SweepPoint]:
    """The swept points: all sweeps where nothing else was asked for."""
    from convoy.compare.study.study_sweep import parse_base, sweep_points

    names = values.words_of(given.SWEPT if sweep is None and only else sweep)
    middle = parse_base(base)
    return [point for kind in kinds for point in sweep_points(names, kind(middle), device)]


def _listed(path: Path | None, kinds: Sequence[Kind]) -> list[SweepPoint]:
    from convoy.compare.study.study_sweep import BASE, read_layers

    return [] if path is None else [point for kind in kinds for point in read_layers(path, kind(BASE))]


def _of_kind(problem: ConvProblem, *, dtype: str, numerics: str, direction: str) -> ConvProblem:
    """The same sizes in the types, rounding and direction that were asked for."""
    types = dict.fromkeys(("x_dtype", "weight_dtype", "y_dtype"), dtype)
    return replace(problem, **types, numerics=numerics, direction=direction)
