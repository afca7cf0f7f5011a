"""What can go wrong with a candidate: an outcome with a status and a reason, or a device that does not answer any more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

import torch

from convoy.errors import CompileError
from convoy.perfdb.row import Status

REASON_LINES: Final = 12
REASON_CHARACTERS: Final = 2000


class Failure(Exception):  # noqa: N818 - not an error of the program: an outcome with its status
    """A candidate that is out, with the status and the reason of its row."""

    def __init__(self, status: Status, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason

    def bare(self) -> Failure:
        """Itself, without traceback and causes: their frames hold what the launch had allocated."""
        self.__cause__ = self.__context__ = None
        return self.with_traceback(None)


class ContextLostError(Exception):
    """The device's context cannot be used any more in this process (CUDA, after an illegal access)."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.reason)
        self.failure = failure


def first_lines(text: str) -> str:
    """The beginning of a compiler's or an exception's words, cut to what a row may hold."""
    return "\n".join(text.strip().splitlines()[:REASON_LINES])[:REASON_CHARACTERS]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory is used up: a failure's status, or Python's, torch's or CUDA's way."""
    if isinstance(error, Failure):
        return error.status is Status.OUT_OF_MEMORY
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    words = ("out of memory", "can't allocate memory", "cannot allocate memory", "std::bad_alloc")
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in words)


def failure_of(error: Exception, otherwise: Status) -> Failure:
    """What an exception out of an engine means for its row; an engine may raise whatever it likes."""
    if isinstance(error, Failure):
        return error
    if is_out_of_memory(error):
        return Failure(Status.OUT_OF_MEMORY, first_lines(str(error)) or type(error).__name__)
    if isinstance(error, CompileError):
        return Failure(Status.COMPILE_ERROR, first_lines(f"{error.summary}\n{error.log}"))
    return Failure(otherwise, first_lines(f"{type(error).__name__}: {error}"))


T = TypeVar("T")


def run_or_fail(launch: Callable[[], T], device: str) -> T:
    """Run a launch; what it raises becomes a Failure, or a ContextLostError where the device does not answer afterwards."""
    try:
        return launch()
    except Exception as error:  # an engine may raise anything, and each becomes a row with its reason
        failure = failure_of(error, Status.LAUNCH_ERROR)
        try:
            if device == "cuda":
                try:
                    torch.cuda.synchronize()
                except RuntimeError:
                    raise ContextLostError(failure) from error
            raise failure from error
        finally:
            del failure  # its traceback has this frame: the ring would keep what the launch had allocated
