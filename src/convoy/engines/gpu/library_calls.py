"""Which nodes of a captured CUDA graph a library added, and by which call: for packages, which repeat the call elsewhere.

An engine that calls a library runs the call through `noted`. Outside of `noting` this costs one look at a variable.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final

import torch

from convoy.engines.compilers.cuda_bindings import driver
from convoy.errors import CompileError


@dataclass(frozen=True, slots=True)
class LibraryCall:
    """One run of an execution plan of cuDNN's.

    Attributes:
        plan: the plan, as the JSON text that cuDNN makes and reads.
        operands: (uid of a tensor of the plan's graph, device address).
        workspace: device address; 0: none.
        workspace_bytes: its size.
    """

    plan: str
    operands: tuple[tuple[int, int], ...]
    workspace: int = 0
    workspace_bytes: int = 0


@dataclass(frozen=True, slots=True)
class NotedCall:
    """A call during a capture.

    Attributes:
        call: what was called.
        nodes: handles of the nodes (CUgraphNode) that it added to the captured graph.
    """

    call: LibraryCall
    nodes: frozenset[int]


_NOTED: Final[ContextVar[list[NotedCall] | None]] = ContextVar("_NOTED", default=None)


@contextmanager
def noting() -> Generator[list[NotedCall]]:
    """Note the calls of this thread that are captured; the list grows as they come."""
    found: list[NotedCall] = []
    token = _NOTED.set(found)
    try:
        yield found
    finally:
        _NOTED.reset(token)


def noted(run: Callable[[], None], describe: Callable[[], LibraryCall]) -> None:
    """Call a library on PyTorch's current stream.

    Args:
        run: makes the call.
        describe: says what was called; asked only while somebody notes calls of a capture.

    Raises:
        CompileError: the CUDA driver does not say what a capture has so far.
    """
    found = _NOTED.get()
    if found is None or not torch.cuda.is_current_stream_capturing():
        run()
        return
    before = _captured_nodes()
    run()
    found.append(NotedCall(describe(), _captured_nodes() - before))


def _captured_nodes() -> frozenset[int]:
    """Handles of all nodes of the graph that the current stream is captured to."""
    cuda = driver()
    stream = cuda.CUstream(torch.cuda.current_stream().cuda_stream)
    # cuda-bindings names the function by its newest form: _v3 up to CUDA 12, plain from 13 on. All answer status, id, graph, ...
    ask = next(
        getattr(cuda, name)
        for name in ("cuStreamGetCaptureInfo", "cuStreamGetCaptureInfo_v3", "cuStreamGetCaptureInfo_v2")
        if hasattr(cuda, name)
    )
    graph = _checked(ask(stream))[2]
    count = _checked(cuda.cuGraphGetNodes(graph, 0))[1]
    return frozenset(int(node) for node in _checked(cuda.cuGraphGetNodes(graph, count))[0]) if count else frozenset()


def _checked(answer: tuple[Any, ...]) -> tuple[Any, ...]:
    error, *rest = answer
    if int(error):
        raise CompileError("package", f"the CUDA driver does not say what was captured: {error.name}")
    return tuple(rest)
