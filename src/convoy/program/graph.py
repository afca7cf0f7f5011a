"""GraphProgram: a bound plan captured once as a CUDA graph and replayed. One launch for the whole net."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from convoy.program.bind import Bound
from convoy.program.eager import EagerProgram, empty
from convoy.program.recording import recording, stream_beside
from convoy.program.streamed import StreamedProgram

_WARMUP_CALLS = 2
"""Runs before capture: the first compiles and lets cuDNN measure, the second shows that nothing is left to initialise."""


class GraphProgram:
    """A bound plan as one CUDA graph with static buffers.

    Safe with other streams, several threads and several programs at once: a lock orders the calls on the host, an event
    orders them on the device, and each program has its own memory pool. A call costs a copy of each input into the static
    buffers, one graph launch, and a copy of each output, unless `static_outputs`.

    Args:
        bound: the plan with its executables.
        device: a CUDA device.
        static_outputs: return the graph's own output buffers, which the next call overwrites.

    Attributes:
        eager: the same launches one by one: what was captured, and what another graph may capture.
        inputs: the static buffers that it reads.
    """

    def __init__(self, bound: Bound, device: torch.device, *, static_outputs: bool = False) -> None:
        self.bound = bound
        self.device = device
        self.static_outputs = static_outputs
        self._lock = threading.Lock()
        several = any(step.step.stream for step in bound.steps)
        self.eager = StreamedProgram(bound, device) if several else EagerProgram(bound, device)
        self.inputs = [empty(spec, layout, device) for spec, layout in bound.inputs]
        for tensor in self.inputs:
            tensor.zero_()
        self._graph = torch.cuda.CUDAGraph()
        stream = stream_beside(device, self.eager.streams)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.device(device), torch.cuda.stream(stream):
            for _ in range(_WARMUP_CALLS):
                self.eager(self.inputs)
        stream.synchronize()
        with recording(self._graph, stream):
            self._outputs = self.eager(self.inputs)
        self._keeps = self.eager.workspace()  # the thread that captured may end before the graph does
        self._done = torch.cuda.Event()
        self._done.record(torch.cuda.current_stream(device))

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run on inputs of the plan's specs, on the caller's current stream; returns the graph's outputs in order."""
        with self._lock, torch.cuda.device(self.device):
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(self._done)
            for static, tensor in zip(self.inputs, inputs, strict=True):
                static.copy_(tensor, non_blocking=True)
            self._graph.replay()
            outputs = self._outputs if self.static_outputs else [_copy(tensor) for tensor in self._outputs]
            self._done.record(stream)
            return list(outputs)

    def replay(self) -> None:
        """Launch the graph alone, on whatever the static inputs hold: what is timed as the net's own time."""
        with self._lock, torch.cuda.device(self.device):
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(self._done)
            self._graph.replay()
            self._done.record(stream)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.preserve_format)
