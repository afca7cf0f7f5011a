"""Names of the package that tests on a GPU replace exist: those tests do not run here, and a name that moved would stop them."""

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

FILES = sorted((Path(__file__).parents[1] / "gpu").rglob("*.py"))


def modules(tree: ast.Module) -> dict[str, ModuleType]:
    """The package's modules that a file imports, by the name that it gives them."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("convoy"):
            for name in node.names:
                whole = getattr(importlib.import_module(node.module), name.name, None) or submodule(
                    node.module, name.name
                )
                if isinstance(whole, ModuleType):
                    found[name.asname or name.name] = whole
    return found


def submodule(package: str, name: str) -> ModuleType | None:
    """None where a package has no module of this name."""
    try:
        return importlib.import_module(f"{package}.{name}")
    except ModuleNotFoundError:
        return None


def replaced(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """(module, name) of each `….setattr(module, "name", …)` and `module.name = …`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "setattr":
            owner, name = (*node.args, None, None)[:2]
            if isinstance(owner, ast.Name) and isinstance(name, ast.Constant):
                yield owner.id, name.value
        for target in node.targets if isinstance(node, ast.Assign) else ():
            if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
                yield target.value.id, target.attr


def missing(text: str) -> list[str]:
    """The names that a file replaces and the package does not have."""
    tree = ast.parse(text)
    known = modules(tree)
    return [f"{known[m].__name__}.{n}" for m, n in replaced(tree) if m in known and not hasattr(known[m], n)]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_what_is_replaced_is_there(path):
    assert missing(path.read_text()) == []


def test_a_name_that_moved_is_found():
    text = "\n".join(
        [
            "from convoy.tune import tuning_task",
            "patch.setattr(tuning_task, 'QUICK_COMPILED', 0)",
            "tuning_task.NOTHING = 1",
            "tuning_task.TuningTask = 2",
        ]
    )
    assert sorted(missing(text)) == ["convoy.tune.tuning_task.NOTHING", "convoy.tune.tuning_task.QUICK_COMPILED"]
