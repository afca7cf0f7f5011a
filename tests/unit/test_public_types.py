"""The script of tests/typing, which `make types` checks, runs and has every public name; `Settings` takes the enums' words."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import re
from enum import StrEnum
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import pytest

import convoy
from convoy import settings
from tests.unit.pipeline.untimed import plans_kept

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "typing" / "public_calls.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("public_calls", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.filterwarnings("ignore:convoy")
def test_the_script_runs(script: ModuleType, tmp_path: Path) -> None:
    words, enums, _ = script.settings_of(tmp_path)
    assert (words.effort, words.db) == (enums.effort, enums.db)
    with plans_kept():
        assert isinstance(script.inference(tmp_path), convoy.OptimizedModule)
        assert isinstance(script.training(tmp_path), convoy.TrainingStep)
        assert script.packages(tmp_path).shape == (1, 4, 6, 6)
    assert len(script.functions()) > 20


def test_the_script_has_every_public_name_and_every_field() -> None:
    text = SCRIPT.read_text(encoding="utf-8")
    assert [name for name in convoy.__all__ if not re.search(rf"\b{name}\b", text)] == []
    assert [field.name for field in dataclasses.fields(convoy.Settings) if f" {field.name}=" not in text] == []
    for kind in (convoy.OptimizedModule, convoy.TrainingStep, convoy.PackagedModule):
        page = (ROOT / "docs" / "reference" / "python.md").read_text(encoding="utf-8")
        (members,) = re.findall(rf"\.{kind.__name__}\n\s+options:\n(?:\s+heading: .*\n)?\s+members: \[(.*?)\]", page)
        unused = [name for name in members.split(", ") if not re.search(rf"\.{name}\b", text)]
        assert unused in ([], ["group"])


def test_make_checks_the_script_with_both_checkers() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (test,) = re.findall(r"^test:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    for target, command in (
        ("types-basedpyright", "basedpyright -p tests/typing"),
        ("types-mypy", "mypy --config-file tests/typing/mypy.ini"),
    ):
        (recipe,) = re.findall(rf"^{target}:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
        assert command in recipe
        assert target in test


WORDS: dict[type[StrEnum], Any] = {
    settings.Effort: settings.EffortName,
    settings.Numerics: settings.NumericsName,
    settings.Solver: settings.SolverName,
    settings.LayoutChoice: settings.LayoutName,
    settings.Check: settings.CheckName,
}


@pytest.mark.parametrize("kind", WORDS)
def test_the_words_for_type_checkers_are_those_of_the_enum(kind: type[StrEnum]) -> None:
    assert get_args(WORDS[kind]) == tuple(str(member) for member in kind)


def test_the_constructor_for_type_checkers_has_the_fields_names_and_defaults() -> None:
    text = inspect.getsource(settings)
    (body,) = re.findall(r"def __init__\(\n\s+self,\n(.*?)\n\s+\) -> None: \.\.\.", text, re.DOTALL)
    declared = [re.match(r"\s+(\w+): .* = (.*),$", line) for line in body.splitlines()]
    shown = {match[1]: match[2] for match in declared if match}
    fields = dataclasses.fields(convoy.Settings)
    assert list(shown) == [field.name for field in fields]
    for field in fields:
        if field.default is not dataclasses.MISSING:
            assert eval(shown[field.name], vars(settings)) == field.default
        else:
            assert shown[field.name] == "..."
