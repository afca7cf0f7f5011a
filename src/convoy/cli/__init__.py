"""The command line, one file a command. Heavy modules are imported by the commands that use them."""

from __future__ import annotations

import sys
import traceback
import warnings
from typing import Annotated

import typer

from convoy._version import __version__
from convoy.cli import (
    compare,
    db,
    doctor,
    engines,
    explain,
    layers,
    optimize,
    prune,
    report,
    run,
    scale,
    sparsity,
    study,
    train,
)
from convoy.errors import ConvoyError

app = typer.Typer(
    name="convoy",
    help="Makes convolutional networks run faster on the machine they are on, and says why.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("optimize")(optimize.optimize)
app.command("run")(run.run)
app.command("train")(train.train)
app.command("prune")(prune.prune)
app.command("sparsity")(sparsity.sparsity)
app.command("explain")(explain.explain)
app.command("layers")(layers.layers)
app.command("engines")(engines.engines)
app.add_typer(db.app, name="db")
app.command("compare")(compare.compare)
app.command("study")(study.study)
app.command("scale")(scale.scale)
app.command("report")(report.report)
app.command("doctor")(doctor.doctor)

INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 + SIGINT, as shells have it."""


def _show_version(value: bool) -> None:
    if value:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    del version


def main() -> None:
    """The entry point: one clear line for an error that a user can mend, exit code 2; 1 for an internal one."""
    warnings.filterwarnings("ignore", category=FutureWarning)  # what libraries deprecate is for programmers
    try:
        app()
    except ConvoyError as error:
        # What a user can mend is one line, whatever a library's own words in it look like; a compiler's log stays whole.
        typer.echo(f"convoy: {' '.join(str(error).split()) if error.exit_code == 2 else error}", err=True)
        sys.exit(error.exit_code)
    except SystemExit as end:  # typer turns a KeyboardInterrupt into this code, and says nothing
        if end.code == INTERRUPTED:
            typer.echo("convoy: interrupted; what was measured is kept in the database", err=True)
        raise
    except BrokenPipeError:
        sys.exit(1)
    except Exception as error:
        typer.echo(f"convoy: internal error: {type(error).__name__}: {error}", err=True)
        traceback.print_exc()
        sys.exit(1)
