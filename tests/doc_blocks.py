"""Code blocks of the pages: fenced ones by their language, indented ones by what they hold. Not a test module."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    *sorted(page for page in (ROOT / "docs").rglob("*.md") if "notes" not in page.relative_to(ROOT).parts),
]
"""Notes say what was done on some day."""


@dataclass(frozen=True, slots=True)
class Block:
    """A block of a page.

    Attributes:
        page: path of the page from the root.
        line: number of its first line.
        kind: `python`, `commands` (lines that begin with `convoy`), `shell` (other commands) or `text`.
        text: its lines, without indentation.
    """

    page: str
    line: int
    kind: str
    text: str

    @property
    def first(self) -> str:
        """The first line."""
        return self.text.splitlines()[0]

    @property
    def commands(self) -> list[str]:
        """The `convoy` lines, comments removed."""
        lines = [line.removeprefix("$ ").split("  #")[0].split(" #")[0].strip() for line in self.text.splitlines()]
        return [line for line in lines if line.startswith("convoy ")]


def blocks_of(page: Path) -> list[Block]:
    """All code blocks of a page, in order."""
    name = page.relative_to(ROOT).as_posix()
    return blocks_in(page.read_text(encoding="utf-8"), name)


def blocks_in(text: str, name: str) -> list[Block]:
    """All code blocks of a page's text, in order."""
    lines = text.splitlines()
    found: list[Block] = []
    at, after_blank = 0, True
    while at < len(lines):
        fence = re.match(r"^```(\w*)", lines[at])
        if fence:
            end = lines.index("```", at + 1)
            body = "\n".join(lines[at + 1 : end])
            found.append(Block(name, at + 2, kind_of(body, fence[1]), body))
            at, after_blank = end + 1, True
        elif after_blank and lines[at].startswith("    ") and lines[at].strip():
            end = at
            while end < len(lines) and (lines[end].startswith("    ") or not lines[end].strip()):
                end += 1
            body = "\n".join(line[4:] for line in lines[at:end]).rstrip()
            found.append(Block(name, at + 1, kind_of(body, ""), body))
            at, after_blank = end, True
        else:
            after_blank = not lines[at].strip()
            at += 1
    return found


def kind_of(body: str, language: str) -> str:
    """A block's kind: by the language of its fence, else by what it holds."""
    if language:
        return "python" if language == "python" else "text"
    lines = [line.removeprefix("$ ") for line in body.splitlines() if line.strip()]
    if any(line.startswith("convoy ") for line in lines):
        return "commands"
    if all(re.match(r"(?:make|pip|git|export|python|\.venv/bin/)\b|\.venv/bin/", line) for line in lines):
        return "shell"
    try:
        ast.parse(body)
    except SyntaxError:
        return "text"
    return "python" if re.search(r"^(?:import|from|for|with) |[\w\]] = |\(", body, re.MULTILINE) else "text"


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
