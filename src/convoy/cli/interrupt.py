"""Ctrl-C: exit code 130 and one line, whatever the command was doing.

Python's own handler raises KeyboardInterrupt wherever the main thread happens to be. Where C++ code has called Python, as while
torch is imported, that ends the process by `std::terminate`. In a destructor or a bare `except:` the exception is lost; amid an
import it leaves half a module, which fails in some other way. So the handler here raises nothing by default: it does what
`cleaned_up` and `keeps` were told, and ends the process. It does raise where Convoy's own Python code has something to write or
to end:

- in `convoy.measurement`, which writes the rows of the problem that it is measuring,
- in commands that start other programs (`unwinds`).

There a second Ctrl-C, or `PATIENCE_S` without an end, ends the process at once.

Tuning that has, or can predict, an answer is ended early instead (`stopped_by`): the command writes its results, and its exit
code is 130 nevertheless.

This module and what it imports are imported before anything else of the command line: keep them few.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Generator
from types import FrameType
from typing import Final

EXIT_CODE: Final = 130
"""128 + SIGINT, as shells have it."""

PATIENCE_S: Final = 10.0
"""How long a raised KeyboardInterrupt may take to end the command."""

MEASURED: Final = "the measurements are kept in the database"
"""Said by commands that measure candidates."""

NOTHING: Final = "nothing was written"
"""Said where a command has not said what it keeps."""

FINISHING: Final = "finishing with the best so far (Ctrl-C again ends at once)"

_RAISES_IN: Final = "convoy.measurement."


class _State:
    """State of the handler; one for each call of `main`."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self.interrupted = self.told = False
        self.unwinds = False
        self.kept: Callable[[], str] = lambda: NOTHING
        self.stops: Callable[[], bool] = lambda: False
        self.cleanups: list[Callable[[], object]] = []


_state = _State()


def install() -> Callable[[], None]:
    """Handle SIGINT from here on, unless the process was started with it ignored (`nohup`, `&`).

    Returns:
        A function that restores the previous handler.
    """
    global _state  # noqa: PLW0603 - a signal handler belongs to the process, and so does its state
    _state = _State()
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        return lambda: None
    before = signal.signal(signal.SIGINT, _on_interrupt)

    def restore() -> None:
        signal.signal(signal.SIGINT, before or signal.SIG_DFL)
        if hasattr(signal, "setitimer") and signal.getsignal(signal.SIGALRM) is _end:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)

    return restore


def ignore() -> None:
    """The command is done: Ctrl-C changes nothing any more. While Python shuts down it would put back the system's handling."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def was_interrupted() -> bool:
    """Whether Ctrl-C was pressed: later exceptions of the command are caused by it."""
    return _state.interrupted


def unwinds() -> None:
    """Say that this command must be left by an exception, for it ends programs that it has started."""
    _state.unwinds = True


def keeps(words: Callable[[], str]) -> None:
    """Set the function that says which results are kept when this command is interrupted.

    Args:
        words: called by the handler; gives a phrase such as "the measurements are kept in the database".
    """
    _state.kept = words


@contextlib.contextmanager
def cleaned_up(cleanup: Callable[[], object]) -> Generator[None]:
    """Have something done when Ctrl-C ends the process amid the block, where no `finally` runs."""
    _state.cleanups.append(cleanup)
    try:
        yield
    finally:
        _state.cleanups.remove(cleanup)


@contextlib.contextmanager
def stopped_by(stop: Callable[[], bool]) -> Generator[None]:
    """Have the first Ctrl-C amid the block end work early, which then gives its best result; a second one ends the process.

    Args:
        stop: called by the handler; returns whether there will be a result. If not, the process ends as always.
    """
    _state.stops = stop
    try:
        yield
    finally:
        _state.stops = lambda: False


def tell() -> None:
    """Write the one line; under torchrun the first process does."""
    if _state.told or os.environ.get("RANK", "0") != "0":
        return
    _state.told = True
    try:
        words = _state.kept()
    except Exception as error:  # a file that cannot be read any more
        words = f"what was kept cannot be read: {error}"
    # Not by sys.stderr: its lock may be held by the very code that was interrupted.
    with contextlib.suppress(OSError):
        os.write(2, f"convoy: interrupted; {words}\n".encode(errors="backslashreplace"))


def _on_interrupt(number: int, frame: FrameType | None) -> None:
    del number
    if os.getpid() != _state.process:  # a child that was forked: its parent tells
        os._exit(EXIT_CODE)
    again, _state.interrupted = _state.interrupted, True
    if not again and _state.stops():
        with contextlib.suppress(OSError):
            os.write(2, f"convoy: interrupted; {FINISHING}\n".encode())
        _state.told = True
        return
    _state.told = _state.told and not again  # the second Ctrl-C ends something else than the first one
    if again or not (_state.unwinds or _module_of(frame).startswith(_RAISES_IN)):
        _end()
    if hasattr(signal, "setitimer"):
        signal.signal(signal.SIGALRM, _end)
        signal.setitimer(signal.ITIMER_REAL, PATIENCE_S)
    raise KeyboardInterrupt


def _module_of(frame: FrameType | None) -> str:
    """The module whose code was interrupted; where it waits for a thread, the module that waits."""
    while frame is not None and frame.f_globals.get("__name__") in ("threading", "queue"):
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", "")) if frame is not None else ""


def _end(*_: object) -> None:
    """End the process here and now."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        for cleanup in reversed(_state.cleanups):
            with contextlib.suppress(Exception):
                cleanup()
        with contextlib.suppress(Exception):
            _remove_temporary_folders()
        tell()
    finally:
        os._exit(EXIT_CODE)


def _remove_temporary_folders() -> None:
    """Remove the folders that a `with TemporaryDirectory()` would have removed."""
    tempfile = sys.modules.get("tempfile")
    if tempfile is None:
        return
    import gc

    for found in [each for each in gc.get_objects() if type(each) is tempfile.TemporaryDirectory]:
        with contextlib.suppress(Exception):
            found.cleanup()
