"""docs/reference/cli.md is generated from the commands' help, and all of it has help."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer

from convoy.cli.app import app

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")


def commands(command: Any = None, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Every leaf of the command tree: (`db info`, the command)."""
    command = command or typer.main.get_command(app)
    children = getattr(command, "commands", {})
    for name, child in children.items():
        yield from commands(child, (*path, name))
    if not children:
        yield " ".join(path), command


COMMANDS = dict(commands())


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    """The script that writes the generated parts."""
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "_site" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_generated_parts_are_what_the_code_says(generate: ModuleType) -> None:
    stale = [str(page) for page, text in generate.pages().items() if page.read_text(encoding="utf-8") != text]
    assert stale == [], "run make reference"


def test_a_changed_help_makes_the_page_stale(generate: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    before = generate.cli_reference()
    monkeypatch.setattr(generate, "_flowing", lambda text: f"{text} changed")
    assert generate.cli_reference() != before


def test_every_command_has_a_section() -> None:
    assert re.findall(r"^## convoy ([a-z ]+?)(?: \[?[A-Z_\]\[ ]+)?$", PAGE, re.MULTILINE) == list(COMMANDS)
    assert len(COMMANDS) > 10


@pytest.mark.parametrize("name", COMMANDS)
def test_a_section_names_every_option_once(name: str) -> None:
    section = PAGE.split(f"\n## convoy {name}")[1].split("\n## ")[0]
    named = re.findall(r"^\| `(--[\w-]+)`", section, re.MULTILINE)
    options = [p for p in COMMANDS[name].params if p.param_type_name == "option" and not p.hidden]
    assert sorted(named) == sorted(next(o for o in p.opts if o.startswith("--")) for p in options)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_option_and_argument_has_help(name: str) -> None:
    assert len(COMMANDS[name].help) > 20
    for parameter in COMMANDS[name].params:
        assert parameter.help, parameter.name
