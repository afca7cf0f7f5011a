"""Every module of bench/ can be imported, and bench/README.md lists every script."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"
MODULES = sorted(BENCH.glob("*/*.py"))


def is_script(path: Path) -> bool:
    return 'if __name__ == "__main__":' in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_a_module_can_be_imported_and_one_with_a_main_runs_it(path: Path) -> None:
    module = importlib.import_module(f"bench.{path.parent.name}.{path.stem}")
    assert module.__doc__
    assert is_script(path) is hasattr(module, "main")


def test_the_readme_lists_the_scripts_and_their_results() -> None:
    text = (BENCH / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(\w+/\w+\.py)`", text))
    assert named == {f"{path.parent.name}/{path.name}" for path in MODULES if is_script(path)}
    results = {re.match(r"[a-z-]+?(?=-(?:nvidia|amd|intel))", path.name)[0] for path in BENCH.glob("results/*.csv")}  # type: ignore[index]
    assert results == set(re.findall(r"`([a-z-]+)-\*\.csv`", text))
