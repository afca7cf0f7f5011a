"""Recordings of CUDA graphs that could not be ended: what PyTorch leaves behind then is put right.

The driver calls a recording invalid where something in it is not allowed, such as waiting for the device, or freeing memory when
it is used up. Ending it fails then, in words of its own instead of the launch's, and before PyTorch has undone what it did to
begin (2.11, `CUDAGraph::capture_end`):

- Its allocator still asks the graph whether memory is for it, as does that of pinned memory: the graph must stay, or a later
  allocation reads what is freed. The allocator takes a recording to be under way, too, and gives back nothing that it has cached.
- The graph's memory pool counts as used: not even `torch.cuda.empty_cache` gives it back.
- The device's generator takes itself for one that is recorded: every draw is refused.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Final

import torch

_UNFINISHED: Final[list[torch.cuda.CUDAGraph]] = []
"""Graphs whose recording could not be ended. None may be freed: nothing takes away what the allocator of pinned memory asks."""


@contextmanager
def record_graph(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, pool: Any = None) -> Iterator[None]:
    """Record what is launched inside, on a stream that is none of the default ones; other threads may go on using the device.

    By hand: the context manager `torch.cuda.graph` gives all cached memory back to the driver first.
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
) -> Iterator[None]:
    """Record what is launched inside. Where that fails, it leaves torch's current stream and random numbers as they were.

    Args:
        way: begins the recording and ends it.
        graph: what is recorded.
        device: where.
        pool: the memory pool that `way` has from its caller: a graph tells of its own only when its recording was ended.
        shared: whether other graphs use that pool.

    Raises:
        BaseException: what a launch inside raised, and not how ending the recording failed after that.
    """
    caller = torch.cuda.current_stream(device)
    cause: BaseException | None = None
    try:
        with way:
            try:
                yield
            except BaseException as error:
                cause = error
                raise
    except BaseException as error:  # an error of ending it, mostly
        _recover(graph, caller, pool, shared=shared)
        cause = error if cause is None else cause
    # Out here, or the error of ending it would be its context, whose frames hold what the launch had allocated.
    try:
        if cause is not None:
            raise cause
    finally:
        cause = None


def distinct_stream(device: torch.device, taken: Collection[torch.cuda.Stream] = ()) -> torch.cuda.Stream:
    """A stream that is none of some others.

    PyTorch hands out the same 32 in turn: a net that meets one of its own again loses what would have run beside it.
    """
    stream = torch.cuda.Stream(device)
    while stream in taken:
        stream = torch.cuda.Stream(device)
    return stream


def _recover(graph: torch.cuda.CUDAGraph, caller: torch.cuda.Stream, pool: Any, *, shared: bool) -> None:
    with torch.cuda.device(caller.device):
        torch.cuda.set_stream(caller)  # `torch.cuda.graph` leaves its own where its exit fails
        if _was_ended(graph):
            return
        _UNFINISHED.append(graph)
        with suppress(RuntimeError):
            graph.reset()  # as far as PyTorch itself undoes what was begun
        _give_back(caller.device, pool, shared=shared)
        _record_nothing(caller)


def _was_ended(graph: torch.cuda.CUDAGraph) -> bool:
    """Whether a graph's recording was ended; only then it tells of its pool."""
    try:
        graph.pool()
    except RuntimeError:
        return False
    return True


def _give_back(device: torch.device, pool: Any, *, shared: bool) -> None:
    """End what still allocates to a pool, and take back the use that was counted when it began, by PyTorch's private means.

    The allocator refuses the first where nothing allocates to the pool: the recording was never begun, or PyTorch has ended that
    itself (pull request 180395, not in 2.11). It may have taken its use back as well then (190348, in `CUDAGraph::reset`): twice
    would spoil the allocator, which does not tell. Without that one, the pool's memory stays lost.

    A pool that others may use keeps its use: what others recorded into it must not hang on how it is counted here.
    """
    end, release = (getattr(torch._C, name, None) for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"))
    if end is None or release is None:
        return
    with suppress(RuntimeError):
        end(device.index, pool)
        if not shared:
            release(device.index, pool)


def _record_nothing(caller: torch.cuda.Stream) -> None:
    """Record a graph that is empty: a recording that is ended has the device's generator draw again.

    It allocates nothing, for there may be no room: the generator has its numbers while there is any graph, as the unfinished one.
    """
    empty = torch.cuda.CUDAGraph()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch warns of graphs that are empty
            with record_graph(empty, distinct_stream(caller.device, (caller,))):
                pass
    except RuntimeError:
        _UNFINISHED.append(empty)
