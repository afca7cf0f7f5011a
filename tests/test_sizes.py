"""No folder, module or function grows too long to be read: docs/concepts/architecture.md depends on small rooms."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Final

import pytest

ROOT = Path(__file__).parents[1]
MOST_FILES: Final = 25
MOST_LINES: Final = 300
LONGEST_FUNCTION: Final = 60
CODE: Final = {".py", ".c", ".h", ".cpp", ".cu", ".cuh", ".js", ".css", ".html"}

EXCEPTIONS: Final = {
    # One algorithm that a compiler gets as one text, whose digest is part of the keys of stored measurements.
    "src/convoy/engines/sparse_activations/zeroskip.c": "318 lines",
}
"""Files that may exceed a limit, with their length. The comment gives the reason."""


def sources(top: Path) -> list[Path]:
    """All files below a folder, without what Python and git made."""
    return [path for path in sorted(top.rglob("*")) if path.is_file() and "__pycache__" not in path.parts]


def too_long(top: Path) -> dict[str, str]:
    """By path, or path and function: the size of everything below a folder that is over its limit."""
    found: dict[str, str] = {}
    files = sources(top)
    for folder in {path.parent for path in files}:
        count = sum(path.parent == folder for path in files)
        if count > MOST_FILES:
            found[folder.relative_to(ROOT).as_posix()] = f"{count} files"
    for path in files:
        if path.suffix not in CODE:
            continue
        name, text = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
        if (lines := text.count("\n")) > MOST_LINES:
            found[name] = f"{lines} lines"
        if path.suffix == ".py":
            found |= {f"{name}:{function}": f"{length} lines" for function, length in long_functions(text).items()}
    return found


def long_functions(text: str) -> dict[str, int]:
    """The functions of a module that are over the limit, with their lines."""
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    lengths = {node.name: (node.end_lineno or 0) - node.lineno + 1 for node in functions}
    return {name: length for name, length in lengths.items() if length > LONGEST_FUNCTION}


def test_the_package_keeps_the_limits() -> None:
    assert too_long(ROOT / "src") == EXCEPTIONS


@pytest.mark.parametrize("folder", ["bench", "examples", "docs/_site"])
def test_scripts_keep_the_limits_of_modules_and_functions(folder: str) -> None:
    assert {name: size for name, size in too_long(ROOT / folder).items() if ".py" in name} == {}


def test_what_is_over_a_limit_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    body = "    pass\n"
    (tmp_path / "right.py").write_text("def right():\n" + body * 59 + "#\n" * 240, encoding="utf-8")
    (tmp_path / "wrong.py").write_text("async def wrong():\n" + body * 60 + "#\n" * 240, encoding="utf-8")
    (tmp_path / "rows.csv").write_text("1\n" * 400, encoding="utf-8")
    many = tmp_path / "many"
    many.mkdir()
    for number in range(25):
        (many / f"{number}.txt").touch()
    assert too_long(tmp_path) == {"wrong.py": "301 lines", "wrong.py:wrong": "61 lines"}
    (many / "25.txt").touch()
    assert too_long(tmp_path)["many"] == "26 files"
