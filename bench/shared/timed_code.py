"""A digest of the code that a figure times, without comments and docstrings: a row whose digest is another's is stale."""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]

WHOLE_NETS = ("engines", "program", "regions", "schedule", "selection")
"""Folders of src/convoy that decide what runs for a whole net, and run it."""

CPU_ALONE = (
    "engines/cpu/",
    "engines/compilers/host_compiler.py",
    "engines/sparse_activations/zeroskip_cpu.py",
    "program/native_chains.py",
)
"""Files of `WHOLE_NETS` that run on CPUs alone, by the beginnings of their paths; sources in C (`.c`) do too."""

_CPU_MODULES = "convoy.engines.cpu."
"""How the names of modules begin that the list of engines (`engines/manifest.py`) names for CPUs alone."""

_COMMENTS = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


@cache
def whole_net_code(device: str) -> str:
    """The digest of the present code of `WHOLE_NETS` that runs on a device, `cpu` or `cuda`."""
    source = ROOT / "src" / "convoy"
    paths = [path for name in WHOLE_NETS for path in (source / name).rglob("*")]
    if device == "cpu":
        return digest(paths)
    return digest((path for path in paths if not _is_for_cpus(path.relative_to(source))), without=_CPU_MODULES)


def _is_for_cpus(path: Path) -> bool:
    return path.suffix == ".c" or path.as_posix().startswith(CPU_ALONE)


def digest(paths: Iterable[Path], *, without: str = "") -> str:
    """Twelve hex digits over Python, C and CUDA files; comments, docstrings, layout and the files' names do not count.

    Args:
        paths: the files; others among them do not count.
        without: beginning of texts; entries of dictionaries with such a value do not count. Empty: all do.
    """
    parts = sorted(_normal(path, without) for path in paths if path.suffix in (".py", ".c", ".h", ".cu", ".cuh"))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def is_stale(row: dict[str, str]) -> bool:
    """Whether a row of a whole net was measured with other code than the present one, or does not say with which."""
    device = "cuda" if "cuda=" in row.get("versions", "") else "cpu"
    return row.get("code", "") != whole_net_code(device)


def _normal(path: Path, without: str) -> str:
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        return " ".join(_COMMENTS.sub(" ", text).split())
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [part for part in node.body if not _is_text(part)]
        if without and isinstance(node, ast.Dict):
            kept = [pair for pair in zip(node.keys, node.values, strict=True) if not _begins(pair[1], without)]
            node.keys, node.values = [key for key, _ in kept], [value for _, value in kept]
    return _dumped(tree)


def _begins(node: ast.expr, text: str) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith(text)


def _dumped(value: object) -> str:
    """A syntax tree as text that is the same under every version of Python: `ast.dump` shows fields that a version added."""
    if isinstance(value, ast.AST):
        fields = [
            f"{name}={_dumped(field)}" for name, field in ast.iter_fields(value) if field is not None and field != []
        ]
        return f"{type(value).__name__}({', '.join(fields)})"
    if isinstance(value, list):
        return f"[{', '.join(map(_dumped, value))}]"
    return repr(value)


def _is_text(node: ast.stmt) -> bool:
    """A docstring, or an attribute's description below it."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
