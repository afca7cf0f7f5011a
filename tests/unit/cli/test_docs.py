"""docs/reference/cli.md and the command line say the same: every command, every option, nothing else; and all of it has help."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from convoy.cli.commands import app

PAGE = (Path(__file__).parents[3] / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")


def commands(command: Any = None, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Every leaf of the command tree: (`db info`, the command)."""
    command = command or typer.main.get_command(app)
    children = getattr(command, "commands", {})
    for name, child in children.items():
        yield from commands(child, (*path, name))
    if not children:
        yield " ".join(path), command


COMMANDS = dict(commands())


def sections() -> dict[str, tuple[str, str]]:
    """Command → (the arguments in its heading, its section's text)."""
    found: dict[str, tuple[str, str]] = {}
    for part in PAGE.split("\n## convoy ")[1:]:
        heading, _, text = part.partition("\n")
        words = heading.split()
        name = " ".join(word for word in words if word.islower())
        found[name] = (" ".join(word for word in words if not word.islower()), text)
    return found


def options(command: Any) -> set[str]:
    """The long names; a short one stands beside its long one in words."""
    found = {name for p in command.params if p.param_type_name == "option" for name in (*p.opts, *p.secondary_opts)}
    return {name for name in found if name.startswith("--")}


def test_every_command_has_a_section_and_every_section_a_command() -> None:
    assert set(sections()) == set(COMMANDS)
    assert len(COMMANDS) > 10


@pytest.mark.parametrize("name", COMMANDS)
def test_a_section_names_exactly_the_commands_options_and_arguments(name: str) -> None:
    arguments, text = sections()[name]
    documented = re.findall(r"^\| `(--[\w-]+)(?: [A-Z]+)?` \| \S.* \|$", text, re.MULTILINE)
    assert len(documented) == len(set(documented))
    assert set(documented) == options(COMMANDS[name])
    wanted = [p.name.upper() for p in COMMANDS[name].params if p.param_type_name == "argument"]
    assert arguments.replace("[", "").replace("]", "").split() == wanted


@pytest.mark.parametrize("name", COMMANDS)
def test_a_value_is_documented_where_one_is_taken(name: str) -> None:
    rows = dict(re.findall(r"^\| `(--[\w-]+)( [A-Z]+)?` \|", sections()[name][1], re.MULTILINE))
    flags = {p.opts[0]: p.is_flag for p in COMMANDS[name].params if p.param_type_name == "option"}
    assert {option: not value for option, value in rows.items()} == flags


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_option_and_argument_has_help(name: str) -> None:
    assert len(COMMANDS[name].help) > 20
    for parameter in COMMANDS[name].params:
        assert parameter.help, parameter.name


def test_no_unknown_option_is_named_anywhere_on_the_page() -> None:
    known = {option for command in COMMANDS.values() for option in options(command)} | {"--help", "--version"}
    assert set(re.findall(r"--[a-z][\w-]*", PAGE)) <= known


def test_a_default_that_the_page_names_is_the_commands() -> None:
    for name, (_, text) in sections().items():
        defaults = {p.opts[0]: p.default for p in COMMANDS[name].params}
        for option, row in re.findall(r"^\| `(--[\w-]+)[^`]*` \| (.*) \|$", text, re.MULTILINE):
            for word in re.findall(r"`(\w+)` \(default", row):
                assert defaults[option] == word
