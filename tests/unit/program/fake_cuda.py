"""As much of torch.cuda as recording a graph needs, on a CPU: which stream is the current one, and how recordings fail.

Not a test module. A recording launches nothing on a GPU; here its launches run, and a replay does nothing but count.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager, nullcontext
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
        begun: recordings that were begun.
        replays: of any graph.
    """

    def __init__(self) -> None:
        self.current = FakeStream()
        self.recording = self.draws_recorded = False
        self.invalid, self.spoiled = True, False
        self.begun = self.replays = 0

    def draw(self) -> None:
        """Draw a random number."""
        if self.draws_recorded != self.recording:
            raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")


def install(patch: pytest.MonkeyPatch) -> FakeCuda:
    """Put it in torch.cuda's place."""
    cuda = FakeCuda()

    class Graph:
        """A graph; it has a pool once its recording was ended."""

        ended = False

        def pool(self) -> tuple[int, int]:
            if not self.ended:
                raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")
            return 0, 1

        def replay(self) -> None:
            cuda.replays += 1

    class Recording:
        """torch.cuda.graph, as it is: an exit that fails leaves the stream and the generator as they are."""

        def __init__(self, graph: Graph, pool: object = None, stream: Any = None, capture_error_mode: str = "") -> None:
            self._graph, self._stream = graph, stream

        def __enter__(self) -> None:
            cuda.begun += 1
            self._before, cuda.current = cuda.current, self._stream
            cuda.recording = cuda.draws_recorded = True

        def __exit__(
            self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
        ) -> None:
            cuda.recording = False
            spoiled, cuda.spoiled = cuda.spoiled, False
            if spoiled or (error is not None and cuda.invalid):
                raise RuntimeError(f"CUDA error: {ENDED}\nand a second line")
            self._graph.ended = True
            cuda.draws_recorded = False
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
    patch.setattr(torch.cuda, "Stream", FakeStream)
    patch.setattr(torch.cuda, "Event", FakeEvent)
    patch.setattr(torch.cuda, "stream", on)
    patch.setattr(torch.cuda, "device", device)
    patch.setattr(torch.cuda, "current_stream", lambda _=None: cuda.current)
    patch.setattr(torch.cuda, "current_device", lambda: 0)
    patch.setattr(torch.cuda, "set_stream", lambda stream: setattr(cuda, "current", stream))
    patch.setattr(torch.cuda, "synchronize", lambda _=None: None)
    return cuda
