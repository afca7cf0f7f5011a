"""Progress of a long call: a bar in a terminal, a display that updates in a notebook, a line now and then elsewhere.

All of it goes to standard error, or into the notebook's cell. Lines that are printed meanwhile go through `hidden`, so that
they do not run into the bar.
"""

from __future__ import annotations

import html
import sys
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import TracebackType
from typing import Any, Final, Protocol, Self

from convoy.untrusted import escape_controls

FIRST_LINE_S: Final = 10.0
"""Seconds after which the first line is written where there is no terminal: shorter calls write none."""

LINE_EVERY_S: Final = 30.0
"""Least seconds between two such lines."""

NOTEBOOK_EVERY_S: Final = 0.2
"""Least seconds between two updates of a notebook's display."""


class _Shown(Protocol):
    """A way of showing progress."""

    def show(self, message: str, done: int, total: int) -> None: ...

    def hidden(self) -> AbstractContextManager[object]: ...

    def close(self) -> None: ...


class ProgressDisplay:
    """An observer that shows the progress while its `with` block runs.

    Args:
        silent: show nothing.
    """

    def __init__(self, *, silent: bool = False) -> None:
        self._silent = silent
        self._shown: _Shown | None = None

    @property
    def in_terminal(self) -> bool:
        """Whether a bar is drawn in a terminal now."""
        return isinstance(self._shown, _TerminalBar)

    def __call__(self, message: str, done: int, total: int) -> None:
        """Show what is done: a phrase, the number of things done and of all things (0: unknown)."""
        if self._shown is not None:
            self._shown.show(message, done, total)

    def announce(self, line: str) -> None:
        """Print a line on standard error that stays."""
        if not self._silent:
            with self.hidden():
                print(f"convoy: {escape_controls(line)}", file=sys.stderr, flush=True)

    def hidden(self) -> AbstractContextManager[object]:
        """Take the display away while a block prints."""
        return nullcontext() if self._shown is None else self._shown.hidden()

    def __enter__(self) -> Self:
        if not self._silent:
            self._shown = _way_of_showing()
            _displays.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Take the display away before the block ends."""
        if self._shown is not None:
            _displays.remove(self)
            shown, self._shown = self._shown, None
            shown.close()


_displays: list[ProgressDisplay] = []
"""Displays that are shown now."""


@contextmanager
def hidden() -> Generator[None]:
    """Take all displays away while the block prints; they are drawn again below it."""
    with ExitStack() as stack:
        for display in _displays:
            stack.enter_context(display.hidden())
        yield


@contextmanager
def shown(wanted: bool) -> Generator[ProgressDisplay]:
    """A display for a block; silent where none is wanted."""
    with ProgressDisplay(silent=not wanted) as display:
        yield display


def _way_of_showing() -> _Shown:
    draw = _notebook_display()
    if draw is not None:
        return _NotebookDisplay(draw)
    from rich.console import Console

    console = Console(stderr=True)
    return _TerminalBar(console) if console.is_terminal and not console.is_dumb_terminal else _Lines()


class _TerminalBar:
    """rich's bar in the last line of the terminal."""

    def __init__(self, console: Any) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        words = max(12, min(64, console.width - 36))
        self._progress = Progress(
            TextColumn("{task.description:<" + f"{words}.{words}" + "}", markup=False),
            BarColumn(bar_width=max(4, min(40, console.width - words - 22))),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            redirect_stdout=sys.stdout.isatty(),  # else what is piped would be printed in the terminal
        )
        self._task = self._progress.add_task("capturing the model", total=None)
        self._progress.start()

    def show(self, message: str, done: int, total: int) -> None:
        self._progress.update(self._task, description=escape_controls(message), completed=done, total=total or None)

    @contextmanager
    def hidden(self) -> Generator[None]:
        self._progress.stop()
        try:
            yield
        finally:
            self._progress.start()

    def close(self) -> None:
        self._progress.stop()


class _NotebookDisplay:
    """A display in the cell's output that is updated in place, and stays with the last message."""

    def __init__(self, draw: Callable[..., Any]) -> None:
        self._start = time.monotonic()
        self._last, self._next = ("capturing the model", 0, 0), 0.0
        self._handle = draw(self._data(), raw=True, display_id=True)

    def show(self, message: str, done: int, total: int) -> None:
        self._last = message, done, total
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + NOTEBOOK_EVERY_S
            self._handle.update(self._data(), raw=True)

    def hidden(self) -> AbstractContextManager[object]:
        return nullcontext()  # outputs of a cell stand below one another

    def close(self) -> None:
        _, done, total = self._last
        self._last = "convoy: done" if not total or done >= total else self._last[0], done, total
        self._handle.update(self._data(), raw=True)

    def _data(self) -> dict[str, str]:
        message, done, total = self._last
        text = _line(message, done, total, time.monotonic() - self._start)
        share = f' value="{done}" max="{total}"' if total else ""
        return {"text/plain": text, "text/html": f"<progress{share}></progress> {html.escape(text)}"}


class _Lines:
    """A line now and then, where the output is read later."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._next = self._start + FIRST_LINE_S

    def show(self, message: str, done: int, total: int) -> None:
        now = time.monotonic()
        if now >= self._next:
            self._next = now + LINE_EVERY_S
            print(f"convoy: {_line(message, done, total, now - self._start)}", file=sys.stderr, flush=True)

    def hidden(self) -> AbstractContextManager[object]:
        return nullcontext()

    def close(self) -> None:
        pass


def _line(message: str, done: int, total: int, seconds: float) -> str:
    count = f", {done} of {total}" if total else ""
    return f"{escape_controls(message)}{count}, {int(seconds) // 60}:{int(seconds) % 60:02d}"


def _notebook_display() -> Callable[..., Any] | None:
    """IPython's `display` where a notebook's kernel runs this process; IPython is not imported for it."""
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is None or getattr(shell, "kernel", None) is None:
        return None
    import importlib

    return importlib.import_module("IPython.display").display
