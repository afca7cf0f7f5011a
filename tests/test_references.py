"""Modules, functions and files that docstrings, comments and pages name are there."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import convoy

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "convoy"

FOLDERS = {path.name for path in SOURCE.iterdir() if path.is_dir()} - {"graph", "package", "plan", "problem", "report"}
"""Folders whose names begin a reference, such as `schedule.assign_streams`; the others are names of values too."""

NO_MODULES = {
    "convoy.h": "the header of libconvoy",
    "convoy.late_update": "a provider in bench/results",
}
"""Words that look like references → their meaning."""

PLANNED = {"src/convoy/cli/commands/weigh.py": "the example of CONTRIBUTING.md, which a test writes"}
"""File that is named and not there → why."""

DOTTED = re.compile(r"`([a-z_]\w*(?:\.\w+)+)(?:\(\))?`")
FILES = re.compile(r"(?<![\w/.-])((?:bench|docs|tests|src|examples)/[a-z0-9_./-]+\.(?:py|md|csv|toml|cuh?|[ch]))\b")


@cache
def modules() -> dict[str, Path]:
    """Dotted name → file, packages included."""
    found: dict[str, Path] = {}
    for path in SOURCE.rglob("*.py"):
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def names_in(module: str) -> frozenset[str]:
    """All names that a module defines, imports or uses."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(modules()[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.alias):
            found.add(node.asname or node.name)
        elif isinstance(node, ast.Name | ast.Attribute):
            found.add(node.id if isinstance(node, ast.Name) else node.attr)
    return frozenset(found)


def is_there(name: str) -> bool:
    """Whether a dotted name below `convoy` is a module, or a name in one."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        module = ".".join(parts[:length])
        if module in modules():
            return length == len(parts) or parts[length] in {
                *names_in(module),
                *(convoy.__all__ if length == 1 else ()),
            }
    return False


def missing_in(text: str) -> list[str]:
    """References and files that a text names and that are not there."""
    found = [name for name in FILES.findall(text) if not (ROOT / name).exists() and name not in PLANNED]
    for name in DOTTED.findall(text):
        first = name.split(".")[0]
        full = name if first == "convoy" else f"convoy.{name}"
        if (first == "convoy" or first in FOLDERS) and name not in NO_MODULES and not is_there(full):
            found.append(name)
    return found


def texts() -> Iterator[tuple[str, str]]:
    """Yield the place and text of each docstring, comment and page.

    Results, notes and the change log are left out: they name providers, and things of former versions.
    """
    for path in sorted(SOURCE.rglob("*.py")):
        for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
            if token.type in (tokenize.COMMENT, tokenize.STRING):
                yield f"{path.relative_to(ROOT).as_posix()}:{token.start[0]}", token.string
    pages = [page for page in ROOT.glob("*.md") if page.name != "CHANGELOG.md"]
    pages += [page for page in (ROOT / "docs").rglob("*.md") if not {"notes", "results"} & set(page.parts)]
    for page in sorted(pages):
        yield page.relative_to(ROOT).as_posix(), page.read_text(encoding="utf-8")


def test_what_docstrings_comments_and_pages_name_is_there() -> None:
    missing = {place: found for place, text in texts() if (found := missing_in(text))}
    assert missing == {}


def test_what_counts_as_a_reference() -> None:
    text = "`schedule.dag_of`, `convoy.optimize`, `engines.manifest.RETIRED`, `aten.relu.default`, bench/all.py, tests/gpu/X.py"
    assert missing_in(text) == []
    wrong = "`schedule.spread`, `convoy.optimise`, `engines.fresh`, bench/none.py"
    assert missing_in(wrong) == ["bench/none.py", "schedule.spread", "convoy.optimise", "engines.fresh"]


def test_exceptions_are_needed() -> None:
    every = "\n".join(text for _, text in texts())
    assert [name for name in NO_MODULES if f"`{name}`" not in every] == []
    assert [name for name in PLANNED if name not in every or (ROOT / name).exists()] == []
