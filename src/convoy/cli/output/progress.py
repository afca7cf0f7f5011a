"""The progress of a command. Ctrl-C clears a terminal's line."""

from __future__ import annotations

import os
from contextlib import ExitStack
from types import TracebackType
from typing import Final, Self

from convoy.cli import interrupt
from convoy.cli.output.lines import say
from convoy.progress import ProgressDisplay

_CLEAR: Final = b"\r\x1b[2K\x1b[?25h"
"""Empties the terminal's line and shows its cursor, which rich hides."""


class Bar(ProgressDisplay):
    """Shows a command's progress; of torchrun's processes the first one does."""

    def __init__(self) -> None:
        super().__init__(silent=os.environ.get("RANK", "0") != "0")
        self._drawn = ExitStack()

    def say(self, text: str, *, err: bool = False) -> None:
        """Print a line of the result; the bar makes way for it, as for all that `convoy.cli.output.lines.say` prints."""
        say(text, err=err)

    def tell(self, message: str) -> None:
        """Say something on standard error that is no result."""
        say(f"convoy: {message}", err=True)

    def pause(self) -> None:
        """Remove the bar: results follow."""
        self.close()

    def __enter__(self) -> Self:
        super().__enter__()
        if self.in_terminal:  # not by rich, whose thread may hold the locks that it needs to stop
            self._drawn.enter_context(interrupt.cleaned_up(lambda: os.write(2, _CLEAR)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        self._drawn.close()
