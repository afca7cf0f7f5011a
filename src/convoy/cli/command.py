"""The class of all commands: help in groups, former names of options, and errors that name options as they were typed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from typer.core import TyperCommand, TyperGroup

from convoy.cli.flag_names import CommandLineError, FlagNames, UsageError, value_word
from convoy.cli.output.files import check_overwrites
from convoy.cli.output.lines import say
from convoy.errors import InputError, SelectionError, unknown_name

MODEL: Final = "Model and input"
GOAL: Final = "What to optimise for"
TRAINING: Final = "Training"
CHECKPOINTS: Final = "Checkpoints and plans"
PRUNING: Final = "Pruning"
FINETUNING: Final = "Fine-tuning and accuracy"
ACCURACY: Final = "Accuracy"
ADVICE: Final = "Advice (--advise)"
SUBJECT: Final = "What to measure"
PROCESSES: Final = "GPUs and hosts"
MEASURING: Final = "Measuring"
TUNING: Final = "Tuning time and memory"
ENGINES: Final = "Engines"
OUTPUT: Final = "Output"

GROUPS: Final = (
    MODEL, SUBJECT, PRUNING, FINETUNING, ACCURACY, TRAINING, PROCESSES, GOAL, TUNING, ENGINES, MEASURING, ADVICE,
    CHECKPOINTS, OUTPUT,
)  # fmt: skip
"""Groups of options, in the order in which help shows them."""

RENAMED: Final[Mapping[str, Mapping[str, str]]] = {
    "optimize": {
        "--memory-budget": "--memory-budget-bytes",
        "--tuning-memory": "--tuning-memory-bytes",
        "--tune-seconds": "--time-s",
        "--tune-s": "--time-s",
        "--engine": "--only-engines",
    },
    "compare": {"--tune-seconds": "--time-s", "--tune-s": "--time-s", "--timeout": "--timeout-s", "--output": "--out"},
    "study": {"--engines": "--only-engines", "--output": "--out"},
    "scale": {"--timeout": "--timeout-s", "--seconds": "--round-s", "--output": "--out"},
    "train": {"--clip": "--clip-grad-norm", "--tune-seconds": "--time-s"},
    "prune": {"--output": "--out"},
    "report": {"--output": "--out"},
}
"""By command: former name of an option → its name. The former names are accepted for one release."""


_NAMES: Final = "convoy.flag_names"
"""Key of the names of options in click's context."""

MOST_UNGROUPED: Final = 6
"""Arguments and options of a command up to which its help has one group alone."""

OTHER: Final = "Options"
"""Heading of options without a group."""


def _is_output(parameter: Any) -> bool:
    """Whether an option names an output; commands with few options have no groups."""
    return getattr(parameter, "rich_help_panel", None) == OUTPUT or "--out" in parameter.opts


class Command(TyperCommand):
    """A command whose help groups its options, by their `rich_help_panel`, as plain text."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the words of the command line, former names of options among them.

        Raises:
            ConvoyError: words that the command does not take.
        """
        names = FlagNames(self.params, args, RENAMED.get(self.name or "", {}))
        ctx.meta[_NAMES] = names
        try:
            return super().parse_args(ctx, with_new_names(self.name or "", args))
        except UsageError as error:
            raise names.refusal(error, ctx.command_path) from None

    def invoke(self, ctx: Any) -> Any:
        """Run the command; an error about an argument names the option that gave it."""
        names = ctx.meta[_NAMES]
        check_overwrites(
            {names.of(p): ctx.params.get(p.name) for p in self.params if _is_output(p)},
            {names.of(p): ctx.params.get(p.name) for p in self.params if not _is_output(p)},
        )
        try:
            return super().invoke(ctx)
        except InputError as error:
            raise names.renamed(error, ctx.params) from error
        except SelectionError as error:
            raise SelectionError(names.in_text(str(error))) from error

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """`MODEL [OPTIONS]`: optional arguments in brackets."""
        del ctx
        arguments = [p for p in self.params if p.param_type_name == "argument"]
        words = [f"{p.metavar or p.name.upper()}{'...' if p.nargs != 1 else ''}" for p in arguments]
        return [*(w if p.required else f"[{w}]" for p, w in zip(arguments, words, strict=True)), "[OPTIONS]"]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, then each group of options under its own heading."""
        arguments: list[tuple[str, str]] = []
        options: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            record = (_left(parameter), record[1])
            if parameter.param_type_name == "argument":
                arguments.append(record)
            elif len(self.params) <= MOST_UNGROUPED:
                options.setdefault(OTHER, []).append(record)
            else:
                options.setdefault(getattr(parameter, "rich_help_panel", None) or OTHER, []).append(record)
        sections = {"Arguments": arguments, **{group: options[group] for group in GROUPS if group in options}}
        sections |= {group: records for group, records in options.items() if group not in sections}
        for heading, records in sections.items():
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)


def _left(parameter: Any) -> str:
    """The left column of the help: an argument's word, or an option's names and a word for its value."""
    if parameter.param_type_name == "argument":
        return str(parameter.metavar or parameter.name.upper())
    names = ", ".join(sorted((*parameter.opts, *parameter.secondary_opts), key=lambda name: name.startswith("--")))
    return names if parameter.is_flag or parameter.count else f"{names} {value_word(parameter)}"


class CommandGroup(TyperGroup):
    """A command that has commands; for an unknown one it suggests the nearest."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that the first word names.

        Raises:
            CommandLineError: there is none.
        """
        word = args[0]
        if self.get_command(ctx, word) is None and not word.startswith("-"):
            near = unknown_name("", word, self.commands).todo
            see = f"`{ctx.command_path} --help` lists what there is."
            raise CommandLineError(f"{word}: no command of `{ctx.command_path}`. {near}{' ' if near else ''}{see}")
        return super().resolve_command(ctx, args)


def with_new_names(command: str, words: Sequence[str]) -> list[str]:
    """The same words, with the present name of each option that was renamed; each former name is reported once."""
    renamed = RENAMED.get(command, {})
    found: list[str] = []
    reported: set[str] = set()
    for position, word in enumerate(words):
        if word == "--":
            return [*found, *words[position:]]
        name, equals, value = word.partition("=")
        if name in renamed:
            if name not in reported:
                say(f"convoy: {name} is now {renamed[name]}; the next release will not accept {name}", err=True)
            reported.add(name)
            word = renamed[name] + equals + value
        found.append(word)
    return found
