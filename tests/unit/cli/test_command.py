"""Commands' options: in groups where there are many, named after the settings that they set, former names accepted."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import typer

from convoy.cli.app import app
from convoy.cli.command import GROUPS, RENAMED, Command, with_new_names
from convoy.cli.options import values
from convoy.cli.options.values import image_size, words_of
from convoy.errors import InputError
from convoy.settings import Settings

COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def names(command: str) -> set[str]:
    return {name for parameter in COMMANDS[command].params for name in parameter.opts}


@pytest.mark.parametrize("name", [n for n, c in COMMANDS.items() if len(getattr(c, "params", ())) > 9])
def test_a_command_with_many_options_groups_them(name: str) -> None:
    command = COMMANDS[name]
    assert isinstance(command, Command)
    groups = {p.rich_help_panel for p in command.params if p.param_type_name == "option"}
    assert groups <= set(GROUPS)
    assert len(groups) > 2
    words = {"study": [], "run": ["alexnet", "--plan", "net.plan.json"], "export": ["alexnet", "-o", "net.convoy"]}.get(
        name, ["alexnet"]
    )
    with command.make_context(name, words) as context:
        lines = command.get_help(context).splitlines()
    headings = [line.removesuffix(":") for line in lines if line.removesuffix(":") in GROUPS]
    assert headings == [group for group in GROUPS if group in groups]


def test_an_option_that_sets_a_setting_has_its_name() -> None:
    fields = {field.name for field in dataclasses.fields(Settings)}
    for command in ("optimize", "compare", "study", "scale", "train", "prune"):
        flags = {name.removeprefix("--").replace("-", "_") for name in names(command) if name.startswith("--")}
        if "time_s" in flags:
            flags.discard("time")  # the short form stands beside the setting's name
        shortened = {field for field in fields for flag in flags if field.startswith(f"{flag}_")}
        assert not shortened, command


def test_the_page_for_python_gives_each_setting_its_option_or_why_there_is_none() -> None:
    page = (Path(__file__).parents[3] / "docs" / "how-to" / "python.md").read_text(encoding="utf-8")
    rows = dict(
        re.findall(r"^\| `(\w+)` \| (.+) \|$", page.split("| field | option |")[1].split("\n\n")[0], re.MULTILINE)
    )
    assert list(rows) == [field.name for field in dataclasses.fields(Settings)]
    for field, said in rows.items():
        if said == f"`--{field.replace('_', '-')}`":
            assert said.strip("`") in names("optimize")
        else:
            assert said.startswith("none: ")
            assert f"--{field.replace('_', '-')}" not in names("optimize")


def test_every_former_name_gives_an_option_that_the_command_has() -> None:
    for command, renamed in RENAMED.items():
        assert set(renamed.values()) <= names(command)
        assert not set(renamed) & names(command)


def test_a_former_name_is_accepted_and_reported_once(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["m", "--engine", "a", "--engine=b", "--tune-seconds", "3", "--", "--engine"]
    expected = ["m", "--only-engines", "a", "--only-engines=b", "--time-s", "3", "--", "--engine"]
    assert with_new_names("optimize", words) == expected
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert "--engine is now --only-engines" in lines[0]
    assert with_new_names("layers", ["--engine", "a"]) == ["--engine", "a"]


def test_engines_may_be_separated_by_commas_or_repeated() -> None:
    assert words_of(["a,b", " c "]) == words_of("a, b,c") == ["a", "b", "c"]
    assert values.settings_from(only_engines=["a,b", "c"]).only_engines == ("a", "b", "c")


@pytest.mark.parametrize(("text", "expected"), [(None, None), ("224", 224), ("32x32", 32), ("224x320", (224, 320))])
def test_a_size_is_one_number_or_height_and_width(text: str | None, expected: object) -> None:
    assert image_size(text) == expected


@pytest.mark.parametrize("text", ["", "0", "12x", "x12", "12x0", "1x2x3", "-4", "4.5"])
def test_a_size_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"--size: got .* expected HxW in pixels"):
        image_size(text)
