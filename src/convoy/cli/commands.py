"""Every command, and how a command ends. Heavy modules are imported by the commands that use them."""

from __future__ import annotations

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
    interrupt,
    layers,
    optimize,
    prune,
    report,
    scale,
    sparsity,
    study,
    train,
)
from convoy.cli import run as run_command
from convoy.cli.command import Command
from convoy.cli.output import say
from convoy.errors import ConvoyError

app = typer.Typer(
    name="convoy",
    help="Makes convolutional networks run faster on the machine they are on, and says why.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("optimize", cls=Command)(optimize.optimize)
app.command("run")(run_command.run)
app.command("train", cls=Command)(train.train)
app.command("prune", cls=Command)(prune.prune)
app.command("sparsity")(sparsity.sparsity)
app.command("explain")(explain.explain)
app.command("layers")(layers.layers)
app.command("engines")(engines.engines)
app.add_typer(db.app, name="db")
app.command("compare", cls=Command)(compare.compare)
app.command("study", cls=Command)(study.study)
app.command("scale", cls=Command)(scale.scale)
app.command("report", cls=Command)(report.report)
app.command("doctor")(doctor.doctor)


def _show_version(value: bool) -> None:
    if value:
        say(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    del version


def run() -> int:
    """Run the command that `sys.argv` names and return its exit code. Errors are written to standard error."""
    warnings.filterwarnings("ignore", category=FutureWarning)  # deprecations of libraries concern programmers
    try:
        app()
    except ConvoyError as error:
        if not interrupt.was_interrupted():
            # An error that a user can fix is one line, whatever a library's message looks like; a compiler's log stays whole.
            say(f"convoy: {' '.join(str(error).split()) if error.exit_code == 2 else error}", err=True)
        return error.exit_code
    except SystemExit as end:  # typer turns a KeyboardInterrupt into the code of one, and says nothing
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BrokenPipeError:
        return 1
    except Exception as error:
        if not interrupt.was_interrupted():
            say(f"convoy: internal error: {type(error).__name__}: {error}", err=True)
            traceback.print_exc()
        return 1
    return 0
