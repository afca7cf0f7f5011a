"""Writes the parts of the pages that the code says: the command line's reference, and the list of cached functions.

    python docs/_site/generate.py [--check]

With `--check` nothing is written, and the exit code is 1 where a page is not what the code says.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["TERM"] = "dumb"  # no colours in help texts

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "convoy"
CLI = ROOT / "docs" / "reference" / "cli.md"
PROCESS_STATE = ROOT / "docs" / "concepts" / "process-state.md"
BEGIN, END = "<!-- generated: {} -->", "<!-- end -->"


def commands(command: Any = None, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Every command that runs something: (`db info`, the command)."""
    import typer

    from convoy.cli.app import app

    command = command or typer.main.get_command(app)
    children = getattr(command, "commands", {})
    for name, child in children.items():
        yield from commands(child, (*path, name))
    if not children:
        yield " ".join(path), command


def cli_reference() -> str:
    """The reference of the command line, from each command's own help."""
    return "\n\n".join(_command(name, command) for name, command in commands())


def _command(name: str, command: Any) -> str:
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option" and not p.hidden]
    words = [p.name.upper() if p.required else f"[{p.name.upper()}]" for p in arguments]
    parts = [" ".join(["## convoy", name, *words]), _flowing(command.help)]
    if arguments:
        parts.append(_table("argument", [(f"`{p.name.upper()}`", _meaning(p)) for p in arguments]))
    groups: dict[str, list[Any]] = {}
    for option in options:
        groups.setdefault(getattr(option, "rich_help_panel", None) or "", []).append(option)
    for title, members in groups.items():
        if title:
            parts.append(f"**{title}**")
        parts.append(_table("option", [(_names(p), _meaning(p)) for p in members]))
    return "\n\n".join(parts)


def _flowing(text: str | None) -> str:
    """A help text with its paragraphs each on one line."""
    paragraphs = (text or "").replace("\b", "").strip().split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def _names(option: Any) -> str:
    from convoy.cli.flag_names import value_word

    value = "" if option.is_flag else value_word(option).replace("|", "\\|")
    names = ", ".join(f"`{name}`" for name in [*option.opts, *option.secondary_opts])
    return names if option.is_flag else f"{names} `{value}`"


def _meaning(parameter: Any) -> str:
    text = _flowing(parameter.help).replace("|", "\\|").replace("<", "&lt;").rstrip(".")
    default = parameter.default
    if callable(default) or default in (None, False, "", (), []) or getattr(parameter, "is_flag", False):
        return text
    return f"{text}; by default `{default}`"


def _table(head: str, rows: list[tuple[str, str]]) -> str:
    return "\n".join([f"| {head} | meaning |", "|---|---|", *(f"| {name} | {meaning} |" for name, meaning in rows)])


def cached_functions() -> str:
    """Every function of the package whose results are kept as long as the process lives, and how many are kept."""
    rows: list[tuple[str, str]] = []
    for path in sorted(SOURCE.rglob("*.py")):
        module = ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                rows += [(f"`{module}.{node.name}`", size) for d in node.decorator_list if (size := _kept(d))]
    lines = [f"| {name} | {size} |" for name, size in rows]
    return "\n".join(["| function | results kept |", "|---|---|", *lines])


def _number(node: ast.expr) -> int | None:
    """The value of `4096`, `1 << 12` or `None`; ValueError for another expression."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.LShift):
        return ast.literal_eval(node.left) << ast.literal_eval(node.right)
    return ast.literal_eval(node)


def _kept(decorator: ast.expr) -> str:
    """How many results a caching decorator keeps; empty for another decorator."""
    name = ast.unparse(decorator.func if isinstance(decorator, ast.Call) else decorator)
    if name in ("cache", "functools.cache"):
        return "one for each call"
    if name not in ("lru_cache", "functools.lru_cache"):
        return ""
    sizes = decorator.keywords if isinstance(decorator, ast.Call) else []
    size = next((_number(word.value) for word in sizes if word.arg == "maxsize"), 128)
    return "one for each call" if size is None else f"{size}"


def generated(page: Path, name: str, text: str) -> str:
    """A page with the text between its markers replaced."""
    before = page.read_text(encoding="utf-8")
    begin = BEGIN.format(name)
    if not re.search(rf"{re.escape(begin)}.*?{re.escape(END)}", before, re.DOTALL):
        raise SystemExit(f"{page}: the markers {begin} and {END} are missing")
    head, _, rest = before.partition(begin)
    return f"{head}{begin}\n{text}\n{END}{rest.partition(END)[2]}"


def pages() -> dict[Path, str]:
    """Each page that has generated parts, and what it should be."""
    return {
        CLI: generated(CLI, "commands", cli_reference()),
        PROCESS_STATE: generated(PROCESS_STATE, "cached functions", cached_functions()),
    }


def main() -> int:
    """Write or check the pages."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    stale = {page: text for page, text in pages().items() if page.read_text(encoding="utf-8") != text}
    for page, text in stale.items():
        print(f"{page.relative_to(ROOT)}: {'is not what the code says; run make reference' if check else 'rewritten'}")
        if not check:
            page.write_text(text, encoding="utf-8")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
