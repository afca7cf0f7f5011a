"""How a candidate can fail: an outcome with status and reason, or a device that no longer responds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

import torch

from convoy.errors import CompileError
from convoy.perfdb.row import Status

REASON_LINES: Final = 12
REASON_CHARACTERS: Final = 2000


class Failure(Exception):  # noqa: N818 - not an error of the program: an outcome with its status
    """A candidate that failed, with the status and the reason of its row."""

    def __init__(self, status: Status, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason

    def bare(self) -> Failure:
        """The failure without traceback and causes, whose frames would keep the launch's memory alive."""
        self.__cause__ = self.__context__ = None
        return self.with_traceback(None)


class ContextLostError(Exception):
    """The device's context cannot be used any more in this process (CUDA, after an illegal access)."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.reason)
        self.failure = failure


def first_lines(text: str) -> str:
    """The beginning of a compiler's or an exception's message, cut to the length that a row may hold."""
    return "\n".join(text.strip().splitlines()[:REASON_LINES])[:REASON_CHARACTERS]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception means that memory ran out: a failure's status, or an error of Python, PyTorch or CUDA."""
    if isinstance(error, Failure):
        return error.status is Status.OUT_OF_MEMORY
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    words = ("out of memory", "can't allocate memory", "cannot allocate memory", "std::bad_alloc")
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in words)


def failure_of(error: Exception, otherwise: Status) -> Failure:
    """The failure that an engine's exception means for its row; an engine may raise anything."""
    if isinstance(error, Failure):
        return error
    if is_out_of_memory(error):
        return Failure(Status.OUT_OF_MEMORY, first_lines(str(error)) or type(error).__name__)
    if isinstance(error, CompileError):
        return Failure(Status.COMPILE_ERROR, first_lines(f"{error.summary}\n{error.log}"))
    return Failure(otherwise, first_lines(f"{type(error).__name__}: {error}"))


T = TypeVar("T")


def run_or_fail(launch: Callable[[], T], device: str) -> T:
    """Run a launch; its exception becomes a Failure, or a ContextLostError if the device no longer responds."""
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
            del failure  # its traceback holds this frame: the reference cycle would keep the launch's memory alive
