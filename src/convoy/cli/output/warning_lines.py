"""Warnings on the command line: Convoy's own are one plain line each, for the place in the code tells its user nothing."""

from __future__ import annotations

import warnings
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final, TextIO

from convoy.cli.output.lines import say

_OWN: Final = "convoy: "


@contextmanager
def warnings_as_lines() -> Generator[None]:
    """Print Convoy's warnings as `convoy: warning: ...` on standard error; others as Python does.

    Filters decide as ever which warnings are shown. A library's `FutureWarning` is not shown: it concerns programmers.
    At the end all is as it was before.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)
        usual = warnings.showwarning

        def show(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            text = str(message)
            if text.startswith(_OWN):
                say(f"{_OWN}warning: {' '.join(text.removeprefix(_OWN).split())}", err=True)
            else:
                usual(message, category, filename, lineno, file, line)

        warnings.showwarning = show
        yield
