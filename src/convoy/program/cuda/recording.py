"""Capture of launches as a CUDA graph: `torch.cuda.graph` with private streams, and recovery from failed captures."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Final

import torch

from convoy.errors import LaunchError
from convoy.measurement.capture_recovery import distinct_stream, recover_failed_capture
from convoy.measurement.device.memory_limit import reserve_capture_memory

__all__ = ["CAPTURE_FAILURES", "distinct_stream", "first_line", "forget_library_workspaces", "recording"]

CAPTURE_FAILURES: Final = (RuntimeError, LaunchError)
"""Errors that a failed capture raises: PyTorch's and the driver's, or an engine's own."""


@contextmanager
def recording(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, pool: Any = None) -> Generator[None]:
    """Capture the launches of the `with` block on a private stream. Other threads may use the device meanwhile.

    The stream first waits for the caller's stream, which waits for it afterwards. If the capture fails, torch's current stream
    and its random generator work again, so that the same work can be launched without a graph.

    Args:
        graph: an empty graph.
        stream: a stream to which nobody else gives work meanwhile.
        pool: memory pool to share with graphs that are never replayed at the same time as this one.

    Raises:
        RuntimeError, LaunchError: a launch cannot be captured (`CAPTURE_FAILURES`), with the message of the failed launch.
        torch.OutOfMemoryError: the capture does not fit in the GPU's memory.
    """
    device = stream.device
    caller = torch.cuda.current_stream(device)
    stream.wait_stream(caller)
    forget_library_workspaces()
    reserve_capture_memory(stream)
    shared = pool is not None
    pool = pool if shared else torch.cuda.graph_pool_handle()
    capture = torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local")
    try:
        with torch.cuda.device(device), recover_failed_capture(capture, graph, device, pool, shared=shared):
            yield
    finally:
        forget_library_workspaces()
    caller.wait_stream(stream)


def first_line(error: BaseException) -> str:
    """The first line of an error's message; its class name if the message is empty."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def forget_library_workspaces() -> None:
    """Free cuBLAS's workspaces, so that it allocates new ones; to be called before and after a capture.

    PyTorch keeps one workspace for each stream, and frees all of them when its own CUDA graph code captures. A graph that holds
    the address of an older workspace would then write to freed memory. A workspace that was allocated during a capture belongs
    to the graph: other work on that stream would write to it while the graph is replayed.
    """
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:
        clear()
