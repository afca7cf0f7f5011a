"""Recording launches as a CUDA graph: what every capture here needs besides `torch.cuda.graph`."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

import torch

from convoy.errors import LaunchError
from convoy.measurement.room import ask_to_record

FAILURES: Final = (RuntimeError, LaunchError)
"""What is raised where launches cannot be recorded: PyTorch's and the driver's errors, or an engine's own."""

_UNFINISHED: Final[list[torch.cuda.CUDAGraph]] = []
"""Graphs whose recording was invalid. PyTorch's allocator goes on asking them whether memory is for them: none may be freed."""


@contextmanager
def recording(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, pool: Any = None) -> Iterator[None]:
    """Record what is launched inside, on a private stream; other threads may go on using the device meanwhile.

    The stream waits for the caller's first, and the caller's for it afterwards. Where the recording fails, torch's current
    stream is the caller's again and its random numbers can be drawn, so that the same work can be launched instead.

    Args:
        graph: an empty graph.
        stream: no other work may be given to it meanwhile.
        pool: memory pool to share with graphs that are never replayed at the same time as this one.

    Raises:
        RuntimeError, LaunchError: a launch cannot be recorded (`FAILURES`), in the words of the launch that was refused.
        torch.OutOfMemoryError: there is no room to begin.
    """
    device = stream.device
    caller = torch.cuda.current_stream(device)
    stream.wait_stream(caller)
    forget_library_workspaces()
    ask_to_record(stream)
    cause: BaseException | None = None
    try:
        with torch.cuda.device(device), torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local"):
            try:
                yield
            except BaseException as error:
                cause = error
                raise
    except BaseException:
        _recover(graph, caller)
        if cause is None:
            raise
        raise cause from None  # and not what ending the recording said to that
    finally:
        cause = None
        forget_library_workspaces()
    caller.wait_stream(stream)


def _recover(graph: torch.cuda.CUDAGraph, caller: torch.cuda.Stream) -> None:
    """Put right what `torch.cuda.graph` leaves behind where its exit fails: the driver called the recording invalid.

    The recording's stream stays the current one, and the device's generator takes itself for one that is recorded, so that every
    draw is refused; a recording that succeeds ends that.
    """
    with torch.cuda.device(caller.device):
        torch.cuda.set_stream(caller)
        if _was_ended(graph):
            return
        _UNFINISHED.append(graph)
        with suppress(RuntimeError):
            trifle, aside = torch.cuda.CUDAGraph(), stream_beside(caller.device, (caller,))
            ask_to_record(aside)
            with torch.cuda.graph(trifle, stream=aside, capture_error_mode="thread_local"):
                torch.zeros(1, device=caller.device)


def _was_ended(graph: torch.cuda.CUDAGraph) -> bool:
    """Whether a graph's recording was ended; only then it has a pool."""
    try:
        graph.pool()
    except RuntimeError:
        return False
    return True


def first_line(error: BaseException) -> str:
    """The first line of an error's words, or its kind where it has none."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def stream_beside(device: torch.device, taken: Collection[torch.cuda.Stream] = ()) -> torch.cuda.Stream:
    """A stream that is none of some others.

    PyTorch hands out the same 32 in turn: a net that meets one of its own again loses what would have run beside it.
    """
    stream = torch.cuda.Stream(device)
    while stream in taken:
        stream = torch.cuda.Stream(device)
    return stream


def forget_library_workspaces() -> None:
    """Have cuBLAS allocate its workspaces anew, before a capture and after it.

    PyTorch keeps one workspace for each stream, and its own CUDA-graph compiler frees them all when it captures: a graph
    that holds the address of one from before would then write to memory that is not its own. One that was allocated during a
    capture is the graph's: other work on that stream, while the graph is replayed, would write to it too.
    """
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:
        clear()
