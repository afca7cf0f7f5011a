"""convoy doctor: what is installed, what was found, and what is missing for which engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from convoy.cli.output import say
from convoy.errors import InputError

if TYPE_CHECKING:
    from convoy.measurement.device.doctor import Finding


def doctor() -> None:
    """Say what this machine has, and what is missing for which engine."""
    from convoy.measurement.device.doctor import findings
    from convoy.report import print_table
    from convoy.settings import Settings

    found = findings() + extra_engines(Settings().engines)
    print_table(("what", "found", "means"), [(f.what, f.found, f.means) for f in found])
    missing = [f for f in found if not f.ok]
    say(f"{len(missing)} things missing" if missing else "everything is there")


def extra_engines(entries: tuple[str, ...]) -> list[Finding]:
    """Whether each engine of the user's own can be loaded."""
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
