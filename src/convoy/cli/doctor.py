"""convoy doctor: what is installed, what was found, and what is missing for which engine."""

from __future__ import annotations

import typer


def doctor() -> None:
    """Say what this machine has, and what is missing for which engine."""
    from convoy.measurement.doctor import findings
    from convoy.report import print_table

    found = findings()
    print_table(("what", "found", "means"), [(f.what, f.found, f.means) for f in found])
    missing = [f for f in found if not f.ok]
    typer.echo(f"{len(missing)} things missing" if missing else "everything is there")
