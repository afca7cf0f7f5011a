"""Recovers from a CUDA graph capture that could not be ended, and restores what PyTorch leaves behind.

The driver invalidates a capture if something inside is not allowed, such as a device synchronization, or a free when memory
runs out. Ending the capture then fails with an error of its own instead of the launch's, and before PyTorch has undone what
began it (2.11, `CUDAGraph::capture_end`):

- Its allocator, and the one of pinned memory, still ask the graph whether an allocation belongs to it: the graph must stay
  alive, or a later allocation reads freed memory. The allocator also assumes that a capture runs, and returns no cached
  memory.
- The graph's memory pool counts as used: not even `torch.cuda.empty_cache` returns it.
- The device's generator assumes that it is captured: it refuses every draw.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Generator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Final

import torch

from convoy.collection_pause import collection_paused

_UNFINISHED: Final[list[torch.cuda.CUDAGraph]] = []
"""Graphs whose capture could not be ended. They must stay alive: nothing removes the check in the pinned-memory allocator."""


@contextmanager
def record_graph(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, pool: Any = None) -> Generator[None]:
    """Capture the launches inside, on a stream other than the default ones; other threads may use the device meanwhile.

    This does not use `torch.cuda.graph`, which first returns all cached memory to the driver.
    """
    with torch.cuda.stream(stream):
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            yield
        finally:
            graph.capture_end()


@contextmanager
def recover_failed_capture(
    way: AbstractContextManager[object],
    graph: torch.cuda.CUDAGraph,
    device: torch.device,
    pool: Any,
    *,
    shared: bool = False,
) -> Generator[None]:
    """Capture the launches inside. If that fails, PyTorch's current stream and random state are as they were before.

    Python's collector is paused meanwhile: it may find an older `CUDAGraph` in a reference cycle, and destroying that
    invalidates the capture.

    Args:
        way: begins and ends the capture.
        graph: the graph.
        device: its device.
        pool: the memory pool that `way` uses: a graph knows its own only after the capture ended.
        shared: whether other graphs use that pool.

    Raises:
        BaseException: the exception of a launch inside, not the later one of ending the capture.
    """
    caller = torch.cuda.current_stream(device)
    cause: BaseException | None = None
    try:
        with collection_paused(), way:
            try:
                yield
            except BaseException as error:  # everything, an interrupt too: it is the cause to raise
                cause = error
                raise
    except BaseException as error:  # mostly the error of ending the capture
        _recover(graph, caller, pool, shared=shared)
        cause = error if cause is None else cause
    # Raised here, outside the handler: otherwise the other error would be its context, whose frames hold memory.
    try:
        if cause is not None:
            raise cause
    finally:
        cause = None


def distinct_stream(device: torch.device, taken: Collection[torch.cuda.Stream] = ()) -> torch.cuda.Stream:
    """A stream that is none of the given ones.

    PyTorch hands out the same 32 streams in turn: a net that gets one of its own streams again loses concurrency.
    """
    stream = torch.cuda.Stream(device)
    while stream in taken:
        stream = torch.cuda.Stream(device)
    return stream


def _recover(graph: torch.cuda.CUDAGraph, caller: torch.cuda.Stream, pool: Any, *, shared: bool) -> None:
    """Undo a capture that could not be ended."""
    with torch.cuda.device(caller.device):
        torch.cuda.set_stream(caller)  # `torch.cuda.graph` leaves its own stream current if its exit fails
        if _was_ended(graph):
            return
        _UNFINISHED.append(graph)
        with suppress(RuntimeError):
            graph.reset()  # undoes part of the capture
        _give_back(caller.device, pool, shared=shared)
        _record_nothing(caller)


def _was_ended(graph: torch.cuda.CUDAGraph) -> bool:
    """Whether a graph's capture was ended; only then the graph knows its pool."""
    try:
        graph.pool()
    except RuntimeError:
        return False
    return True


def _give_back(device: torch.device, pool: Any, *, shared: bool) -> None:
    """Stop allocations to the pool and undo the use count of the capture, by PyTorch's private functions.

    The allocator refuses the first if nothing allocates to the pool: the capture never began, or PyTorch already stopped it
    (pull request 180395, not in 2.11). PyTorch may have undone the use count as well then (190348, in `CUDAGraph::reset`);
    undoing it twice would corrupt the allocator, which does not report it. Without that change, the pool's memory is lost.

    A shared pool keeps its use count, because other graphs' memory depends on it.
    """
    end, release = (getattr(torch._C, name, None) for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"))
    if end is None or release is None:
        return
    with suppress(RuntimeError):
        end(device.index, pool)
        if not shared:
            release(device.index, pool)


def _record_nothing(caller: torch.cuda.Stream) -> None:
    """Capture an empty graph: after a complete capture the device's generator works again.

    It allocates nothing, because memory may be exhausted: the generator keeps its state tensors while any graph exists, also
    an unfinished one.
    """
    empty = torch.cuda.CUDAGraph()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch warns about empty graphs
            with record_graph(empty, distinct_stream(caller.device, (caller,))):
                pass
    except RuntimeError:
        _UNFINISHED.append(empty)
