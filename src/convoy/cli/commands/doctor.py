"""convoy doctor: the devices, libraries and engines of this machine, and what is missing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from convoy.cli.output.lines import say
from convoy.errors import InputError

if TYPE_CHECKING:
    from convoy.measurement.device.doctor import Finding


def doctor(
    every: Annotated[bool, typer.Option("--all", help="List every engine, and why it does not work here.")] = False,
) -> None:
    """List what this machine has, how many engines work on it, and what is missing."""
    from convoy.measurement.device.doctor import engine_findings, findings
    from convoy.report import print_table
    from convoy.settings import Settings

    found = [*findings(), *engine_findings(every=every), *extra_engines(Settings().engines)]
    print_table(("what", "found", "means"), [(f.what, f.found, f.means) for f in found])
    missing = [f.what for f in found if not f.ok]
    say(f"missing: {', '.join(missing)}" if missing else "nothing is missing")


def extra_engines(entries: tuple[str, ...]) -> list[Finding]:
    """Whether each engine that `CONVOY_ENGINES` names can be loaded."""
    from convoy.engines.manifest import load_engine
    from convoy.measurement.device.doctor import Finding

    found: list[Finding] = []
    for entry in entries:
        engine, _, location = entry.partition("=")
        try:
            family = load_engine(engine, entries).family
        except InputError as error:
            found.append(Finding(f"engine {engine}", "cannot be loaded", str(error), ok=False))
        else:
            found.append(Finding(f"engine {engine}", f"loaded from {location}", family, ok=True))
    return found
