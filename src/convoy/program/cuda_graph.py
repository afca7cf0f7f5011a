"""GraphProgram: a bound plan captured once as a CUDA graph and replayed. One launch for the whole net, where that can be."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from convoy.program.bind import BoundPlan
from convoy.program.eager import EagerProgram, empty
from convoy.program.multi_stream import MultiStreamProgram
from convoy.program.recording import CAPTURE_FAILURES, distinct_stream, first_line, recording

_WARMUP_CALLS = 2
"""Runs before capture: the first compiles and lets cuDNN measure, the second shows that nothing is left to initialise."""


class CudaGraphProgram:
    """A bound plan as one CUDA graph with static buffers.

    Safe with other streams, several threads and several programs at once: a lock orders the calls on the host, an event
    orders them on the device, and each program has its own memory pool. A call costs a copy of each input into the static
    buffers, one graph launch, and a copy of each output, unless `static_outputs`.

    What cannot be captured is launched one by one in every call, under the same lock and event.

    Args:
        bound: the plan with its executables.
        device: a CUDA device.
        static_outputs: return the graph's own output buffers, which the next call overwrites.

    Attributes:
        eager: the same launches one by one: what was captured, and what another graph may capture.
        inputs: the static buffers that it reads.
        refused: why the launches could not be captured, in the words of what refused; empty where they were.

    Raises:
        OutOfMemoryError: there is no room for it.
    """

    def __init__(self, bound: BoundPlan, device: torch.device, *, static_outputs: bool = False) -> None:
        self.bound = bound
        self.device = device
        self.static_outputs = static_outputs
        self._lock = threading.Lock()
        several = any(step.step.stream for step in bound.steps)
        self.eager = MultiStreamProgram(bound, device) if several else EagerProgram(bound, device)
        self.inputs = [empty(spec, layout, device) for spec, layout in bound.inputs]
        for tensor in self.inputs:
            tensor.zero_()
        self.refused = ""
        self._graph = torch.cuda.CUDAGraph()
        self._outputs: list[torch.Tensor] = []
        stream = distinct_stream(device, self.eager.streams)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.device(device), torch.cuda.stream(stream):
            for _ in range(_WARMUP_CALLS):
                self.eager(self.inputs)
        stream.synchronize()
        # Only what recording adds is caught: launches that fail by themselves have failed above.
        try:
            with recording(self._graph, stream):
                self._outputs = self.eager(self.inputs)
        except torch.OutOfMemoryError:
            raise
        except CAPTURE_FAILURES as error:
            self.refused = first_line(error)
            self.eager.recordable = False
        self._keeps = self.eager.workspace()  # the thread that captured may end before the graph does
        self._done = torch.cuda.Event()
        self._done.record(torch.cuda.current_stream(device))

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run on inputs of the plan's specs, on the caller's current stream; returns the graph's outputs in order."""
        with self._lock, torch.cuda.device(self.device):
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(self._done)
            made = self._launched(inputs) if self.refused else self._replayed(inputs)
            # Launched one by one, outputs may come from a side stream's memory, or be inputs: they are copied as well.
            outputs = made if self.static_outputs else [_copy(tensor) for tensor in made]
            self._done.record(stream)
            return list(outputs)

    def replay(self) -> None:
        """Launch the graph alone, or what could not be captured, on whatever the static inputs hold: the net's own time."""
        with self._lock, torch.cuda.device(self.device):
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(self._done)
            if self.refused:
                self._launched(self.inputs)
            else:
                self._graph.replay()
            self._done.record(stream)

    def _replayed(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        for static, tensor in zip(self.inputs, inputs, strict=True):
            static.copy_(tensor, non_blocking=True)
        self._graph.replay()
        return self._outputs

    def _launched(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        with torch.no_grad():
            return self.eager(inputs)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.preserve_format)
