"""Recording launches as a CUDA graph: what every capture here needs besides `torch.cuda.graph`."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def recording(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, pool: Any = None) -> Iterator[None]:
    """Record what is launched inside, on a private stream; other threads may go on using the device meanwhile.

    The stream waits for the caller's first, and the caller's for it afterwards.

    Args:
        graph: an empty graph.
        stream: no other work may be given to it meanwhile.
        pool: memory pool to share with graphs that are never replayed at the same time as this one.
    """
    device = stream.device
    caller = torch.cuda.current_stream(device)
    stream.wait_stream(caller)
    forget_library_workspaces()
    try:
        with torch.cuda.device(device), torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local"):
            yield
    finally:
        forget_library_workspaces()
    caller.wait_stream(stream)


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
