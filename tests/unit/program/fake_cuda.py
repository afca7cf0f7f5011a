"""As much of torch.cuda as recording a graph needs, on a CPU: which stream is the current one, and how recordings fail.

Not a test module. A recording launches nothing on a GPU; here its launches run, and a replay does nothing but count.
"""

from __future__ import annotations

import sys
from collections import Counter
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import count
from types import TracebackType
from typing import Any

import pytest
import torch

CPU = torch.device("cpu")
REFUSED = "operation not permitted when stream is capturing"
ENDED = "operation failed due to a previous error during capture"


class FakeStream:
    """A stream on which everything has happened already."""

    device = CPU

    def __init__(self, device: object = None) -> None:
        pass

    def wait_stream(self, other: FakeStream) -> None:
        pass

    def wait_event(self, event: object) -> None:
        pass

    def synchronize(self) -> None:
        pass


class FakeEvent:
    """An event of no time."""

    def __init__(self, **words: object) -> None:
        self.records = 0

    def record(self, stream: object = None) -> None:
        self.records += 1

    def elapsed_time(self, later: FakeEvent) -> float:
        return float(later.records)


class FakeCuda:
    """The state of one process.

    Attributes:
        current: torch's current stream.
        recording: whether launches are recorded.
        draws_recorded: what the device's generator believes of itself, which refuses every draw while that is not so.
        invalid: whether the driver calls the next recording in which something fails invalid: it cannot be ended then.
        spoiled: whether the next recording turns out to be invalid at its end, though no launch said so.
        ends_routing: whether PyTorch ends what allocates to a graph's pool where its recording cannot be ended (2.13).
        gives_back: whether it gives back the pool's use as well when such a graph is reset.
        begun: recordings that were begun.
        replays: of any graph.
        routed: pools that something allocates to.
        uses: how often each pool was begun and not given back.
    """

    def __init__(self) -> None:
        self.current = FakeStream()
        self.recording = self.draws_recorded = False
        self.invalid, self.spoiled = True, False
        self.ends_routing = self.gives_back = False
        self.begun = self.replays = 0
        self.routed: list[object] = []
        self.uses: Counter[object] = Counter()

    def draw(self) -> None:
        """Draw a random number."""
        if self.draws_recorded != self.recording:
            raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")

    def route(self, pool: object) -> None:
        """Allocate to a pool from now on."""
        if pool in self.routed:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        self.routed.append(pool)
        self.uses[pool] += 1

    def end_routing(self, device: object, pool: object) -> None:
        """PyTorch's `_cuda_endAllocateToPool`."""
        if pool not in self.routed:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.routed.remove(pool)

    def release(self, device: object, pool: object) -> None:
        """PyTorch's `_cuda_releasePool`."""
        assert self.uses[pool] > 0, "given back twice: the allocator is spoiled"
        self.uses[pool] -= 1


def install(patch: pytest.MonkeyPatch) -> FakeCuda:
    """Put it in torch.cuda's place."""
    cuda = FakeCuda()

    handles = count(1)

    class Graph:
        """A graph; it tells of its pool once its recording was ended, and gives that back when it is let go of."""

        ended = False

        def capture_begin(self, pool: object = None, capture_error_mode: str = "") -> None:
            cuda.begun += 1
            self._pool = pool or (next(handles), 0)
            self._handled = sys.exception()  # a recording may be made where another's failure is handled
            cuda.route(self._pool)
            cuda.recording = cuda.draws_recorded = True

        def capture_end(self) -> None:
            cuda.recording = False
            spoiled, cuda.spoiled = cuda.spoiled, False
            if spoiled or (cuda.invalid and sys.exception() is not self._handled):
                if cuda.ends_routing:
                    cuda.end_routing(None, self._pool)
                raise RuntimeError(f"CUDA error: {ENDED}\nand a second line")
            self.ended = True
            cuda.end_routing(None, self._pool)
            cuda.draws_recorded = False

        def pool(self) -> object:
            if not self.ended:
                raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")
            return self._pool

        def reset(self) -> None:
            if not self.ended and cuda.gives_back:
                cuda.release(None, self._pool)

        def replay(self) -> None:
            cuda.replays += 1

    class Recording:
        """torch.cuda.graph, as it is: an exit that fails leaves the stream and the generator as they are."""

        def __init__(self, graph: Graph, pool: object = None, stream: Any = None, capture_error_mode: str = "") -> None:
            self._graph, self._pool, self._stream = graph, pool, stream

        def __enter__(self) -> None:
            self._before, cuda.current = cuda.current, self._stream
            self._graph.capture_begin(self._pool)

        def __exit__(
            self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
        ) -> None:
            self._graph.capture_end()
            cuda.current = self._before

    @contextmanager
    def on(stream: FakeStream) -> Any:
        before, cuda.current = cuda.current, stream
        try:
            yield
        finally:
            cuda.current = before

    def device(_: object) -> AbstractContextManager[None]:
        return nullcontext()

    patch.setattr(torch.cuda, "CUDAGraph", Graph)
    patch.setattr(torch.cuda, "graph", Recording)
    patch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, next(handles)))
    patch.setattr(torch._C, "_cuda_endAllocateToPool", cuda.end_routing, raising=False)
    patch.setattr(torch._C, "_cuda_releasePool", cuda.release, raising=False)
    patch.setattr(torch.cuda, "Stream", FakeStream)
    patch.setattr(torch.cuda, "Event", FakeEvent)
    patch.setattr(torch.cuda, "stream", on)
    patch.setattr(torch.cuda, "device", device)
    patch.setattr(torch.cuda, "current_stream", lambda _=None: cuda.current)
    patch.setattr(torch._C, "_cuda_getCurrentStream", lambda _: (id(cuda.current), 0, 1), raising=False)
    patch.setattr(torch.cuda, "current_device", lambda: 0)
    patch.setattr(torch.cuda, "set_stream", lambda stream: setattr(cuda, "current", stream))
    patch.setattr(torch.cuda, "synchronize", lambda _=None: None)
    return cuda
