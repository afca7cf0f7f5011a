"""What a command says that it kept when Ctrl-C ends it."""

from __future__ import annotations

import json
from pathlib import Path

from convoy.cli import interrupt


def measurements() -> None:
    """This command measures candidates: their rows are in the database as soon as they are measured."""
    interrupt.keeps(lambda: interrupt.MEASURED)


def database() -> None:
    """This command changes the database in one transaction."""
    interrupt.keeps(lambda: "the database has all of the change, or none of it")


def run_file(path: Path | None) -> None:
    """This command writes its run file row by row.

    Args:
        path: the file; None where another host writes it.
    """
    if path is None:
        interrupt.keeps(lambda: "the first host has the run file")
        return
    before = identity(path)

    def words() -> str:
        if identity(path) == before:
            return "nothing was measured yet" if before is None else f"{path} is as it was"
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
        return f"{path} holds {len(rows)} row{'' if len(rows) == 1 else 's'}; the same command goes on from there"

    interrupt.keeps(words)


def identity(file: Path) -> tuple[int, int] | None:
    """Another one for each file that takes this one's place; None where there is none."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns
