"""The progress bar on standard error."""

from __future__ import annotations

import os
from contextlib import ExitStack
from types import TracebackType
from typing import Final, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from convoy.cli import interrupt
from convoy.cli.output import say

_CLEAR: Final = b"\r\x1b[2K\x1b[?25h"
"""Empties the terminal's line and shows its cursor, which rich hides."""


class Bar:
    """An observer of the pipeline that draws a bar; silent where standard error is no terminal."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        columns = (TextColumn("{task.description:<44.44}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._progress.add_task("capturing the model", total=None)
        self._drawn = ExitStack()

    def __call__(self, message: str, done: int, total: int) -> None:
        """Show the current activity."""
        self._progress.update(self._task, description=message, completed=done, total=total or None)

    def say(self, text: str, *, err: bool = False) -> None:
        """Print a line of the result; the bar makes way for it."""
        if self._progress.disable:
            say(text, err=err)
            return
        self._progress.stop()
        say(text, err=err)
        self._progress.start()

    def pause(self) -> None:
        """Remove the bar: results follow."""
        self._progress.stop()

    def tell(self, message: str) -> None:
        """Say something on standard error that is no result."""
        self.say(f"convoy: {message}", err=True)

    def __enter__(self) -> Self:
        if not self._progress.disable:  # not by rich, whose thread may hold the locks that it needs to stop
            self._drawn.enter_context(interrupt.cleaned_up(lambda: os.write(2, _CLEAR)))
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()
        self._drawn.close()
