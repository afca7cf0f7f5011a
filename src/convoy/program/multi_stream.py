"""MultiStreamProgram: launches bound steps on several CUDA streams that wait for each other. A CUDA graph captures it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from convoy.engines.base import Buffers
from convoy.program.bound_plan import BoundPlan, ChannelSlice
from convoy.program.cuda.recording import distinct_stream
from convoy.program.eager import EagerProgram, LaunchObserver, in_layout, result_slice


class MultiStreamProgram(EagerProgram):
    """A bound plan whose steps name streams and waits. Stream 0 is the caller's; the side streams start and end with it.

    Each stream has a workspace of its own. A value is allocated on the stream of the step that makes it; one that several steps
    write in slices, on stream 0. It is freed only when every reader has finished before the next step of that stream
    (`lifetimes.with_frees`), so the allocator never hands out memory that another stream still reads.

    Args:
        bound: the plan with its executables.
        device: a CUDA device.
    """

    def __init__(self, bound: BoundPlan, device: torch.device) -> None:
        super().__init__(bound, device)
        wanted: dict[int, int] = {}
        for step in bound.steps:
            stream = step.step.stream
            wanted[stream] = max(wanted.get(stream, 0), step.executable.workspace_bytes)
        self._side: dict[int, torch.cuda.Stream] = {}
        for index in sorted(wanted.keys() - {0}):
            self._side[index] = distinct_stream(device, tuple(self._side.values()))
        self._workspaces = {
            index: torch.empty(size, dtype=torch.uint8, device=device) for index, size in wanted.items() if size
        }
        self._awaited = {before for step in bound.steps for before in step.step.waits}

    @property
    def streams(self) -> tuple[torch.cuda.Stream, ...]:
        """The side streams."""
        return tuple(self._side.values())

    def workspace(self) -> object:
        """The scratch memory of all streams."""
        return self._workspaces

    def __call__(self, inputs: Sequence[torch.Tensor], observer: LaunchObserver | None = None) -> list[torch.Tensor]:
        """Run on inputs of the plan's specs; returns the graph's outputs in order, ready on the caller's stream."""
        main = torch.cuda.current_stream(self.device)
        slots: list[torch.Tensor | None] = [
            in_layout(tensor, layout) for tensor, (_, layout) in zip(inputs, self.bound.inputs, strict=True)
        ]
        slots.extend(self._blank)
        opens = [step.opens for step, _ in self._steps] + [()]
        self._open(opens[0], slots)
        begun = main.record_event()
        for stream in self._side.values():
            stream.wait_event(begun)
        events: dict[int, torch.Event] = {}
        for index, (step, allocate) in enumerate(self._steps):
            stream = self._side.get(step.step.stream, main)
            with torch.cuda.stream(stream):
                for before in step.step.waits:
                    stream.wait_event(events[before])
                buffers = Buffers(tuple([slots[i] for i in step.args]), allocate(slots), step.constants)  # pyright: ignore[reportArgumentType]
                wants_none = not step.executable.workspace_bytes
                step.executable.launch(buffers, None if wants_none else self._workspaces[step.step.stream])
                if index in self._awaited:
                    events[index] = stream.record_event()
                for slot, result in zip(step.results, buffers.results, strict=True):
                    slots[slot] = result
                if observer is not None:
                    observer.after(index, slots)
            self._open(opens[index + 1], slots)
            for slot in step.frees:
                slots[slot] = None
        for stream in self._side.values():
            main.wait_event(stream.record_event())
        if observer is not None:
            observer.end()
        return [slots[slot] for slot in self.bound.outputs]  # pyright: ignore[reportReturnType]

    def _open(self, parts: Sequence[ChannelSlice], slots: list[torch.Tensor | None]) -> None:
        """Allocate values that steps of several streams write in slices."""
        for part in parts:
            result_slice(slots, part, "nhwc", self.device)
