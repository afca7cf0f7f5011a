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

_COMMENTS = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


@cache
def whole_net_code(device: str) -> str:
    """The digest of the present code of `WHOLE_NETS` that runs on a device, `cpu` or `cuda`."""
    source = ROOT / "src" / "convoy"
    paths = (path for name in WHOLE_NETS for path in (source / name).rglob("*"))
    return digest(path for path in paths if device == "cpu" or not _is_for_cpus(path.relative_to(source)))


def _is_for_cpus(path: Path) -> bool:
    return path.suffix == ".c" or path.as_posix().startswith(CPU_ALONE)


def digest(paths: Iterable[Path]) -> str:
    """Twelve hex digits over Python, C and CUDA files; comments, docstrings, layout and the files' names do not count."""
    parts = sorted(_normal(path) for path in paths if path.suffix in (".py", ".c", ".h", ".cu", ".cuh"))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def is_stale(row: dict[str, str]) -> bool:
    """Whether a row of a whole net was measured with other code than the present one, or does not say with which."""
    device = "cuda" if "cuda=" in row.get("versions", "") else "cpu"
    return row.get("code", "") != whole_net_code(device)


def _normal(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        return " ".join(_COMMENTS.sub(" ", text).split())
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [part for part in node.body if not _is_text(part)]
    return _dumped(tree)


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
