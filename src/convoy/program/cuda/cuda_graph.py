"""CudaGraphProgram: a bound plan that is captured once as a CUDA graph and replayed with one launch."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, cast

import torch

from convoy.program.bound_plan import BoundPlan
from convoy.program.cuda.last_reads import LastReads, last_reads
from convoy.program.cuda.last_work import LastWork, StreamIds
from convoy.program.cuda.recording import CAPTURE_FAILURES, distinct_stream, first_line, recording
from convoy.program.eager import EagerProgram, empty
from convoy.program.multi_stream import MultiStreamProgram
from convoy.program.shared_memory import SharedMemory, present_memory

_WARMUP_CALLS = 2
"""Runs before the capture. The first compiles and lets cuDNN measure; the second initializes nothing more."""


class CudaGraphProgram:
    """A bound plan as one CUDA graph with static buffers.

    Safe with other streams, several threads and several programs at once: a lock orders the calls on the host, an event orders
    them on the device, and each program has a memory pool of its own. Programs for several sizes of one net share all three
    (`SharedMemory`). A call copies each input to a static buffer, launches the graph, and copies each output (unless
    `static_outputs`).

    If the capture fails, every call launches the kernels one by one, under the same lock and event.

    Args:
        bound: the plan with its executables.
        device: a CUDA device; without an index, the current one.
        static_outputs: return the graph's own output buffers, which the next call overwrites.

    Attributes:
        eager: the program that launches the kernels one by one. Other CUDA graphs may capture it.
        inputs: the static input buffers.
        refused: the error of the capture; empty if it succeeded.
        last_reads: kernels whose reads of a large value the cache evicts first (`convoy.program.cuda.last_reads`).

    Raises:
        OutOfMemoryError: the graph does not fit in the GPU's memory.
    """

    def __init__(self, bound: BoundPlan, device: torch.device, *, static_outputs: bool = False) -> None:
        self.bound = bound
        self.device = device
        self.static_outputs = static_outputs
        shared = present_memory()
        self._lock = threading.Lock() if shared is None else shared.lock
        several = any(step.step.stream for step in bound.steps)
        self.eager = MultiStreamProgram(bound, device) if several else EagerProgram(bound, device)
        self.inputs = _static_inputs(bound, device, shared)
        self.refused = ""
        self.last_reads = 0
        last = last_reads(bound)
        self._graph = torch.cuda.CUDAGraph(keep_graph=True) if last else torch.cuda.CUDAGraph()
        self._outputs: list[torch.Tensor] = []
        stream = distinct_stream(device, self.eager.streams)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.device(device), torch.cuda.stream(stream):
            for _ in range(_WARMUP_CALLS):
                self.eager(self.inputs)
        stream.synchronize()
        if shared is not None and not several and bound.workspace_bytes:
            self.eager.use_workspace(shared.workspace(bound.workspace_bytes, device))
        # Only errors of the capture are caught: launches that fail outside of a capture have failed above.
        try:
            with recording(self._graph, stream, None if shared is None else shared.graph_pool()):
                reads = LastReads(last, stream) if last else None
                self._outputs = self.eager(self.inputs, reads)
            if reads is not None:
                self.last_reads = reads.mark(self._graph)
                self._graph.instantiate()
        except torch.OutOfMemoryError:
            raise
        except CAPTURE_FAILURES as error:
            self.refused = first_line(error)
            self.eager.recordable = False
        self._keeps = self.eager.workspace()  # it would be freed with the thread that captured the graph
        self._last_work = LastWork() if shared is None else shared.last_work()
        index = cast("int | None", device.index)
        self._index = torch.cuda.current_device() if index is None else index
        self._stream_ids: StreamIds = ()
        self._stream = torch.cuda.current_stream(device)
        with self._lock:  # programs with the same memory may be running
            stream = self._current_stream()
            self._last_work.precede(stream, self._stream_ids)
            self._last_work.record(stream, self._stream_ids)

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run on inputs of the plan's specs, on the caller's current stream; returns the graph's outputs in order."""
        with self._lock:
            if torch.cuda.current_device() == self._index:  # the context takes longer than the question
                return self._run(inputs)
            with torch.cuda.device(self._index):
                return self._run(inputs)

    def replay(self) -> None:
        """Launch the graph, or the kernels one by one, on the present static inputs, without copies: for timing."""
        with self._lock, torch.cuda.device(self.device):
            stream = self._current_stream()
            self._last_work.precede(stream, self._stream_ids)
            if self.refused:
                self._launched(self.inputs)
            else:
                self._graph.replay()
            self._last_work.record(stream, self._stream_ids)

    def _run(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        stream = self._current_stream()
        self._last_work.precede(stream, self._stream_ids)
        made = self._launched(inputs) if self.refused else self._replayed(inputs)
        # Without a CUDA graph, outputs may be inputs, or memory of a side stream, so they are copied too.
        outputs = list(made) if self.static_outputs else [tensor.clone() for tensor in made]
        self._last_work.record(stream, self._stream_ids)
        return outputs

    def _current_stream(self) -> torch.cuda.Stream:
        """PyTorch's current stream. The object is made once for each stream in a row; the lock is held."""
        found: StreamIds = cast("Any", torch._C)._cuda_getCurrentStream(self._index)
        if found != self._stream_ids:
            self._stream, self._stream_ids = torch.cuda.current_stream(self._index), found
        return self._stream

    def _replayed(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        for static, tensor in zip(self.inputs, inputs, strict=True):
            static.copy_(tensor, non_blocking=True)
        self._graph.replay()
        return self._outputs

    def _launched(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        with torch.no_grad():
            return self.eager(inputs)


def _static_inputs(bound: BoundPlan, device: torch.device, shared: SharedMemory | None) -> list[torch.Tensor]:
    """Buffers for the inputs, with zeros in them; shared ones may have the values of another program's call."""
    if shared is None:
        made = [empty(spec, layout, device) for spec, layout in bound.inputs]
        for tensor in made:
            tensor.zero_()
        return made
    meta = torch.device("meta")
    likes = [empty(spec, layout, meta) for spec, layout in bound.inputs]
    return [shared.input_buffer(index, like, device) for index, like in enumerate(likes)]
