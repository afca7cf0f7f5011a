"""SharedMemory: programs of one net for several sizes hold equal packed weights once, and lay their values in the same memory.

On a GPU, their CUDA graphs share one memory pool, the static input buffers and the workspace, so they run one at a time. On a
CPU, their native chains and launches share one buffer in each thread.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator
from contextvars import ContextVar
from typing import Any

import torch

from convoy.program.cuda.last_work import LastWork
from convoy.program.weight_pool import WeightPool

_PRESENT: ContextVar[SharedMemory | None] = ContextVar("convoy_shared_memory", default=None)


class SharedMemory:
    """Memory of several programs. Programs that are built inside `sharing` use it for as long as they live.

    Attributes:
        weights: packed weights, each once.
        lock: held by a thread while it gives a program's work to a GPU.
    """

    def __init__(self) -> None:
        self.weights = WeightPool()
        self.lock = threading.Lock()
        self._thread = threading.local()
        self._most_scratch = 0
        self._inputs: dict[int, torch.Tensor] = {}
        self._workspace: torch.Tensor | None = None
        self._pool: Any = None
        self._last_work: LastWork | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedMemory:
        """Itself, as the programs are."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """A pickle holds no memory: the programs are built again."""
        return SharedMemory, ()

    def scratch(self, count: int, device: torch.device) -> torch.Tensor:
        """At least `count` bytes that belong to this thread; a program's call leaves nothing in them."""
        self._most_scratch = max(self._most_scratch, count)
        found: torch.Tensor | None = getattr(self._thread, "scratch", None)
        if found is None or found.numel() < count:
            found = torch.empty(self._most_scratch, dtype=torch.uint8, device=device)
            self._thread.scratch = found
        return found

    def workspace(self, count: int, device: torch.device) -> torch.Tensor:
        """At least `count` bytes of a GPU for the launches of CUDA graphs that run one at a time."""
        if self._workspace is None or self._workspace.numel() < count:
            self._workspace = torch.empty(count, dtype=torch.uint8, device=device)
        return self._workspace

    def input_buffer(self, index: int, like: torch.Tensor, device: torch.device) -> torch.Tensor:
        """A static buffer for input `index`, laid out as `like` of the meta device: a part of the largest one that there is.

        A new one is filled with zeros. One that exists is left alone: another thread's call may be using it.
        """
        count = like.numel() * like.element_size()
        found = self._inputs.get(index)
        if found is None or found.numel() < count:
            found = self._inputs[index] = torch.zeros(max(count, 1), dtype=torch.uint8, device=device)
        return found[:count].view(like.dtype).as_strided(like.shape, like.stride())

    def graph_pool(self) -> Any:
        """The memory pool of the CUDA graphs."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        return self._pool

    def last_work(self) -> LastWork:
        """The end of the last program's work on a GPU; the next program's work waits for it."""
        if self._last_work is None:
            self._last_work = LastWork()
        return self._last_work


@contextlib.contextmanager
def sharing(memory: SharedMemory | None) -> Generator[None]:
    """Programs that this thread builds meanwhile share this memory; with None each has its own."""
    token = _PRESENT.set(memory)
    try:
        yield
    finally:
        _PRESENT.reset(token)


def present_memory() -> SharedMemory | None:
    """The memory that a program that is built now is to share; None: it has its own."""
    return _PRESENT.get()
