"""Recording launches as a CUDA graph: what every capture here needs besides `torch.cuda.graph`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch

from convoy.errors import LaunchError
from convoy.measurement.capture_recovery import distinct_stream, recover_failed_capture
from convoy.measurement.device.memory_limit import reserve_capture_memory

__all__ = ["CAPTURE_FAILURES", "distinct_stream", "first_line", "forget_library_workspaces", "recording"]

CAPTURE_FAILURES: Final = (RuntimeError, LaunchError)
"""What is raised where launches cannot be recorded: PyTorch's and the driver's errors, or an engine's own."""


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
    reserve_capture_memory(stream)
    shared = pool is not None
    pool = pool if shared else torch.cuda.graph_pool_handle()
    way = torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local")
    try:
        with torch.cuda.device(device), recover_failed_capture(way, graph, device, pool, shared=shared):
            yield
    finally:
        forget_library_workspaces()
    caller.wait_stream(stream)


def first_line(error: BaseException) -> str:
    """The first line of an error's words, or its kind where it has none."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def forget_library_workspaces() -> None:
    """Have cuBLAS allocate its workspaces anew, before a capture and after it.

    PyTorch keeps one workspace for each stream, and its own CUDA-graph compiler frees them all when it captures: a graph
    that holds the address of one from before would then write to memory that is not its own. One that was allocated during a
    capture is the graph's: other work on that stream, while the graph is replayed, would write to it too.
    """
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:
        clear()
