"""The exception classes. Every error that a user can meet names the value, the expectation and what to do.

`exit_code` is the command line's exit status: 2 for a user's input, 1 for everything else. Errors can be pickled, so that an
error of another process arrives unchanged.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable
from pathlib import PurePath
from typing import Any, Final

MOST_LISTED: Final = 30
"""Names that a message lists; of more it gives the number."""

REPORT: Final = (
    "This is a fault of Convoy, or of an engine that was added to it; no argument is wrong. Please report it."
)
"""What to do about an `InternalError`."""


class ConvoyError(Exception):
    """Base of all errors that Convoy raises on purpose."""

    exit_code = 1

    def __reduce__(self) -> tuple[Any, ...]:
        """Python would call the class with only the message, which most classes reject: unpickling would fail."""
        return _as_raised, (type(self), self.args, vars(self))


class InputError(ConvoyError, ValueError):
    """An argument, option or file that cannot be used.

    Args:
        argument: name of the argument, option or file as the user wrote it.
        value: the given value; shown by `repr`, cut at 120 characters.
        expected: the expectation, as a phrase ("a positive integer").
        todo: what to do, as a sentence; optional.

    All of them may quote a file: the message shows characters that a terminal acts on escaped.
    """

    exit_code = 2

    def __init__(self, argument: str, value: object, expected: str, todo: str = "") -> None:
        self.argument, self.value, self.expected, self.todo = argument, value, expected, todo
        shown = _shown(value)
        if len(shown) > 120:
            shown = shown[:117] + "..."
        message = f"{argument}: got {shown}, expected {expected}." + (f" {todo}" if todo else "")
        super().__init__(_printable(message))


def unknown_name(argument: str, value: object, choices: Iterable[object], todo: str = "") -> InputError:
    """The error for a value that is none of several names: it suggests the nearest ones.

    Args:
        argument: name of the argument, option or file as the user wrote it.
        value: the given value.
        choices: the names that there are; more than `MOST_LISTED` are counted and not listed.
        todo: what to do, as a sentence, behind the suggestion; optional.
    """
    names = {str(choice).lower(): str(choice) for choice in choices}
    near = difflib.get_close_matches(str(value)[:100].lower(), names, n=3, cutoff=0.6)
    suggestion = f"Did you mean {' or '.join(names[name] for name in near)}?" if near else ""
    expected = ", ".join(names.values()) if len(names) <= MOST_LISTED else f"{len(names)} names"
    return InputError(argument, value, f"one of {expected}", " ".join(filter(None, (suggestion, todo))))


class PlanError(InputError):
    """A plan that is malformed, or made for another model, target, shape or version."""


class PackageError(InputError):
    """A `.convoy` package that is damaged, or made for another version, machine or device."""


class UnsupportedError(ConvoyError):
    """An engine was asked by id for a problem that it cannot do."""

    exit_code = 2

    def __init__(self, engine: str, problem: object, reason: str) -> None:
        self.engine, self.problem, self.reason = engine, problem, reason
        super().__init__(f"engine {engine!r} cannot do {problem}: {reason}")


class SelectionError(ConvoyError):
    """No choice of candidates satisfies the constraints (a memory budget that is too small, say)."""

    exit_code = 2


class InternalError(ConvoyError):
    """A fault of Convoy, of an engine that was added to it, or of a package that it calls: no argument is wrong.

    `convoy.training_step` and `torch.compile` run PyTorch instead, with a warning that quotes the message.

    Args:
        where: the part of Convoy that met the fault.
        fault: what is wrong, as a clause.
        todo: what to do, as a sentence.
    """

    def __init__(self, where: str, fault: str, todo: str = REPORT) -> None:
        self.where, self.fault, self.todo = where, fault, todo
        super().__init__(_printable(f"{where}: {fault}. {todo}"))


class CaptureError(ConvoyError):
    """A model could not be turned into a graph; the message includes the exporter's."""

    exit_code = 2


class CompileError(ConvoyError):
    """An engine could not build its code; `log` holds the compiler's output, which the message includes."""

    def __init__(self, engine: str, summary: str, log: str = "") -> None:
        self.engine, self.summary, self.log = engine, summary, log
        super().__init__(f"{engine}: {summary}" + (f"\n--- log ---\n{log}" if log else ""))


class LaunchError(ConvoyError):
    """A built kernel failed when it was launched."""


class DatabaseError(ConvoyError):
    """The performance database cannot be used and could not be repaired."""


class _Short(reprlib.Repr):
    """`repr` for values of any size, limited to what a message shows."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlist = self.maxtuple = self.maxdict = 50
        self.maxlevel, self.maxstring, self.maxother = 8, 200, 200

    def repr1(self, x: Any, level: int) -> str:
        """A path is shown as the text that was given for it."""
        return super().repr1(str(x) if isinstance(x, PurePath) else x, level)

    def repr_int(self, x: int, level: int) -> str:
        """Python refuses to print an integer of more than 4300 digits."""
        del level
        return repr(x) if x.bit_length() < 1000 else f"an integer of {x.bit_length()} bits"


def _shown(value: object) -> str:
    if isinstance(value, str | bytes):
        return repr(value[:200])
    if type(value) in (list, tuple, dict, int) or isinstance(value, PurePath):
        return _Short().repr(value)
    return repr(value)


def _printable(text: str) -> str:
    """A text without control characters and bidirectional overrides; lines stay lines."""
    return "".join(one if one.isprintable() or one == "\n" else ascii(one)[1:-1] for one in text)


def _as_raised(kind: type[ConvoyError], args: tuple[Any, ...], state: dict[str, Any]) -> ConvoyError:
    error = kind.__new__(kind, *args)
    vars(error).update(state)
    return error
