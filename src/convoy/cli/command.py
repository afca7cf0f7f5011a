"""The class of commands with many options: its help shows them in groups, and it still takes options by their former names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from typer.core import TyperCommand

from convoy.cli.output import say

MODEL: Final = "Model and input"
GOAL: Final = "What to optimise for"
TRAINING: Final = "Training"
CHECKPOINTS: Final = "Checkpoints and plans"
PRUNING: Final = "Pruning"
FINETUNING: Final = "Fine-tuning and accuracy"
ADVICE: Final = "Advice (--advise)"
SUBJECT: Final = "What to measure"
PROCESSES: Final = "GPUs and hosts"
MEASURING: Final = "Measuring"
TUNING: Final = "Tuning time and memory"
ENGINES: Final = "Engines"
OUTPUT: Final = "Output"

GROUPS: Final = (
    MODEL, SUBJECT, PRUNING, FINETUNING, TRAINING, PROCESSES, GOAL, TUNING, ENGINES, MEASURING, ADVICE, CHECKPOINTS, OUTPUT,
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
    "train": {"--clip": "--clip-grad-norm"},
    "prune": {"--output": "--out"},
    "report": {"--output": "--out"},
}
"""By command: former name of an option → its name. The former names are accepted for one release."""


class Command(TyperCommand):
    """A command whose help groups its options, by their `rich_help_panel`, as plain text."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the words of the command line, former names of options among them."""
        return super().parse_args(ctx, with_new_names(self.name or "", args))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, then each group of options under its own heading."""
        arguments: list[tuple[str, str]] = []
        options: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            if parameter.param_type_name == "argument":
                arguments.append(record)
            else:
                options.setdefault(getattr(parameter, "rich_help_panel", None) or "Other", []).append(record)
        sections = {"Arguments": arguments, **{group: options[group] for group in GROUPS if group in options}}
        sections |= {group: records for group, records in options.items() if group not in sections}
        for heading, records in sections.items():
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)


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
