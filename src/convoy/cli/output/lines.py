"""Lines that commands print: names, notes and compilers' words may come from files, and a terminal obeys control characters."""

from __future__ import annotations

import typer

from convoy.progress import hidden
from convoy.untrusted import escape_controls


def say(text: str, *, err: bool = False) -> None:
    """Print a text; control characters and bytes that are no Unicode are printed as escapes.

    Args:
        text: one line or several.
        err: to standard error.
    """
    with hidden():
        typer.echo(escape_controls(text), err=err)


def tell(message: str) -> None:
    """Say something that is no result."""
    say(f"convoy: {message}", err=True)
