"""No module imports itself in a circle: not by a lazy import inside a function either, nor under TYPE_CHECKING."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"


@cache
def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name; a folder is the module of its `__init__`."""
    found: dict[str, Path] = {}
    for path in (SOURCE / "convoy").rglob("*.py"):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(module: str, text: str, known: frozenset[str]) -> set[str]:
    """Known modules that a module's text imports; of a folder's `__init__` only what it is imported for."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {
                name
                for alias in node.names
                for name in (f"{node.module}.{alias.name}", node.module)
                if name in known and not (name == node.module and f"{node.module}.{alias.name}" in known)
            }
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name in known}
    return found - {module}


def circles(graph: dict[str, set[str]]) -> set[frozenset[str]]:
    """The strongly connected components of several modules (Tarjan's algorithm)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: set[frozenset[str]] = set()

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for other in sorted(graph.get(module, ())):
            if other not in index:
                visit(other)
                low[module] = min(low[module], low[other])
            elif other in stack:
                low[module] = min(low[module], index[other])
        if low[module] == index[module]:
            members: set[str] = set()
            while not members or module not in members:
                members.add(stack.pop())
            if len(members) > 1:
                found.add(frozenset(members))

    for module in sorted(graph):
        if module not in index:
            visit(module)
    return found


def test_no_modules_import_each_other_in_a_circle() -> None:
    known = frozenset(modules())
    graph = {name: imported(name, path.read_text(encoding="utf-8"), known) for name, path in modules().items()}
    assert sum(map(len, graph.values())) > 1000
    assert circles(graph) == set()


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        ({"p.a": "from p import b", "p.b": "def f():\n    from p.a import x"}, [{"p.a", "p.b"}]),
        ({"p.a": "import p.b", "p.b": "from p.c import x", "p.c": "from p.a import y"}, [{"p.a", "p.b", "p.c"}]),
        ({"p.a": "from p import b, c", "p.b": "from p.c import x", "p.c": "import os"}, []),
        ({"p": "from p.a import x", "p.a": "from p import x"}, [{"p", "p.a"}]),
    ],
)
def test_a_circle_is_found(texts: dict[str, str], expected: list[set[str]]) -> None:
    graph = {name: imported(name, text, frozenset(texts)) for name, text in texts.items()}
    assert circles(graph) == set(map(frozenset, expected))
