"""convoy report: run files as one page, or the difference of two."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from convoy.cli.output.files import check_outputs
from convoy.cli.output.lines import say
from convoy.errors import InputError

REGRESSED = 1
"""Exit code where the newer run is worse."""


def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUNS", help="Run files, as compare, study and scale write them.")
    ],
    output: Annotated[Path | None, typer.Option("--out", "-o", help="The HTML page to write.")] = None,
    diff: Annotated[
        bool, typer.Option("--diff", help="Compare two runs, OLD NEW: exit code 1 where the new one is worse.")
    ] = False,
    tolerance: Annotated[
        float, typer.Option("--tolerance", help="Share by which a time may be worse without being a regression.")
    ] = 0.05,
    memory_tolerance: Annotated[
        float, typer.Option("--memory-tolerance", help="Share by which memory may be more without being a regression.")
    ] = 0.10,
) -> None:
    """Show RUNS as one self-contained page, or print what changed between two."""
    check_outputs({"--out": output})
    from convoy.compare.runs.runfile import read

    found = [read(path) for path in runs]
    if diff:
        from convoy.compare.runs.difference import difference
        from convoy.compare.runs.difference_page import difference_sheet
        from convoy.report.sheet import write_sheet

        if len(found) != 2:
            raise InputError("--diff", len(found), "two run files, the older first")
        changes = difference(found[0], found[1], tolerance, memory_tolerance)
        for line in changes.lines():
            say(line)
        if output is not None:
            write_sheet(difference_sheet(changes, found[0], found[1], (str(runs[0]), str(runs[1]))), output)
        if changes.regressions:
            raise typer.Exit(REGRESSED)
        return
    from convoy.compare.runs.run_page import sheet_of
    from convoy.report.sheet import print_sheet, write_sheet

    sheet = sheet_of(found, [str(path) for path in runs])
    print_sheet(sheet)
    if output is not None:
        write_sheet(sheet, output)
        say(f"report: {output}")
