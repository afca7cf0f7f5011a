"""Every command, and how a command ends. Heavy modules are imported by the commands that use them."""

from __future__ import annotations

import traceback
from typing import Annotated, Any

import typer

from convoy._version import __version__
from convoy.cli import interrupt
from convoy.cli.command import Command, CommandGroup
from convoy.cli.commands import (
    bench,
    compare,
    db,
    doctor,
    engines,
    explain,
    export,
    layers,
    optimize,
    prune,
    report,
    runtime,
    scale,
    sparsity,
    study,
    train,
    warm,
)
from convoy.cli.commands import run as run_command
from convoy.cli.flag_names import FlagNames, UsageError
from convoy.cli.output.lines import say
from convoy.cli.output.warning_lines import warnings_as_lines
from convoy.errors import ConvoyError

app = typer.Typer(
    name="convoy",
    cls=CommandGroup,
    help="Makes convolutional networks run faster on the machine they are on, and says why.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("optimize", cls=Command, short_help="Tune a model on this machine, and report the choice.")(
    optimize.optimize
)
app.command("run", cls=Command, short_help="Run a model by a saved plan, or a package.")(run_command.run)
app.command("bench", cls=Command, short_help="Measure a net as a service: latency, throughput, load.")(bench.bench)
app.command("export", cls=Command, short_help="Write a model and its plan as one file.")(export.export)
app.command("runtime", cls=Command, short_help="Write the C runtime of packages.")(runtime.runtime)
app.command("warm", cls=Command, short_help="Compile the usual kernels beforehand.")(warm.warm)
app.command("train", cls=Command, short_help="Train a classifier on labelled images.")(train.train)
app.command("prune", cls=Command, short_help="Make a model's weights sparse, and fine-tune it.")(prune.prune)
app.command("sparsity", cls=Command, short_help="Show the zeros in a model's feature maps.")(sparsity.sparsity)
app.command("explain", cls=Command, short_help="Print a plan in words.")(explain.explain)
app.command("layers", cls=Command, short_help="List the layers of a model.")(layers.layers)
app.command("engines", cls=Command, short_help="List the engines, and what each supports.")(engines.engines)
app.add_typer(db.app, name="db")
app.command("compare", cls=Command, short_help="Time one model in several frameworks.")(compare.compare)
app.command("study", cls=Command, short_help="Compare convolution algorithms over layer sizes.")(study.study)
app.command("scale", cls=Command, short_help="Time data-parallel training on several GPUs.")(scale.scale)
app.command("report", cls=Command, short_help="Show run files as one page, or compare two.")(report.report)
app.command("doctor", cls=Command, short_help="List what this machine has and what is missing.")(doctor.doctor)


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


def ended_with(result: object) -> int:
    """The exit code of a command that returned: that of `typer.Exit`, else 0."""
    return result if isinstance(result, int) else 0


def tell_refusal(error: Any) -> None:
    """Write why the first words name no command; without words, the help."""
    if type(error).__name__ == "NoArgsIsHelpError":
        say(error.format_message(), err=True)
        return
    path = error.ctx.command_path if error.ctx is not None else "convoy"
    say(f"convoy: {FlagNames((), (), {}).refusal(error, path)}", err=True)


def run() -> int:
    """Run the command that `sys.argv` names and return its exit code. Errors are written to standard error."""
    try:
        with warnings_as_lines():
            return ended_with(app(standalone_mode=False, prog_name="convoy"))
    except UsageError as error:
        tell_refusal(error)
        return 2
    except ConvoyError as error:
        if not interrupt.was_interrupted():
            # An error that a user can fix is one line, whatever a library's message looks like; a compiler's log stays whole.
            say(f"convoy: {' '.join(str(error).split()) if error.exit_code == 2 else error}", err=True)
        return error.exit_code
    except SystemExit as end:  # typer turns a KeyboardInterrupt into the code of one, and says nothing
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except typer.Abort:
        if not interrupt.was_interrupted():
            say("convoy: not confirmed; nothing was changed", err=True)
        return 1
    except BrokenPipeError:
        return 1
    except Exception as error:  # everything: the last resort, which shows the traceback
        if not interrupt.was_interrupted():
            _tell_fault(error)
        return 1


def _tell_fault(error: Exception) -> None:
    from convoy.measurement.failure import is_out_of_memory

    if is_out_of_memory(error):
        first = str(error).strip().partition("\n")[0] or "no memory is left"
        say(f"convoy: out of memory: {first}. Take smaller images (--size) or fewer in a call (--batch).", err=True)
        return
    say(f"convoy: internal error: {type(error).__name__}: {error}", err=True)
    traceback.print_exception(error)
