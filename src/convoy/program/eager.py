"""EagerProgram: runs bound steps one after another on torch's current stream. What a CPU uses, and what a graph captures."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from convoy.engines.base import Buffers
from convoy.engines.subgraph import MEMORY_FORMATS
from convoy.engines.torch_operators import DTYPES
from convoy.problem import ANY_LAYOUT, TensorSpec
from convoy.program.bind import BoundPlan, BoundStep
from convoy.program.concat_in_place import ChannelSlice

Slots = list[torch.Tensor | None]
"""A run's values, by slot; None before they are made and after their last use."""

Allocate = Callable[[Slots], Slots]
"""From the slots to one launch's results."""


class LaunchObserver(Protocol):
    """Told of every launch of a program while it runs, such as what sends gradients away as they are made."""

    def after(self, index: int, slots: Sequence[torch.Tensor | None]) -> None:
        """Launch `index` was given to torch's current stream, and its results are in their slots."""
        ...

    def end(self) -> None:
        """All were launched; torch's current stream is the caller's."""
        ...


class EagerProgram:
    """A bound plan that runs step by step. Safe to call from several threads at once.

    Results that no step allocates by itself are new tensors of the framework, so outputs never alias those of another
    call; the workspace is one buffer a thread, kept from call to call.

    Args:
        bound: the plan with its executables.
        device: where it runs.

    Attributes:
        recordable: False once recording its launches as a CUDA graph has failed.
    """

    def __init__(self, bound: BoundPlan, device: torch.device) -> None:
        self.bound = bound
        self.device = device
        self.recordable = True
        self._local = threading.local()
        self._input_slots = len(bound.inputs)
        self._blank = [None] * (len(bound.slot_names) - self._input_slots)
        self._steps = [(step, _allocator(step, device)) for step in bound.steps]

    def __call__(self, inputs: Sequence[torch.Tensor], follower: LaunchObserver | None = None) -> list[torch.Tensor]:
        """Run on inputs of the plan's specs; returns the graph's outputs in order."""
        slots: list[torch.Tensor | None] = [
            in_layout(tensor, layout) for tensor, (_, layout) in zip(inputs, self.bound.inputs, strict=True)
        ]
        slots.extend(self._blank)
        workspace = self._workspace()
        for index, (step, allocate) in enumerate(self._steps):
            run_step(step, allocate, slots, workspace)
            if follower is not None:
                follower.after(index, slots)
            for slot in step.frees:
                slots[slot] = None
        if follower is not None:
            follower.end()
        return [slots[slot] for slot in self.bound.outputs]  # type: ignore[misc]

    @property
    def streams(self) -> tuple[torch.cuda.Stream, ...]:
        """Streams of its own; none here."""
        return ()

    def workspace(self) -> object:
        """The scratch memory that this thread's calls use: what a graph of such a call must keep."""
        return self._workspace()

    def _workspace(self) -> torch.Tensor | None:
        if not self.bound.workspace_bytes:
            return None
        workspace = getattr(self._local, "workspace", None)
        if workspace is None:
            workspace = torch.empty(self.bound.workspace_bytes, dtype=torch.uint8, device=self.device)
            self._local.workspace = workspace
        return workspace


def run_step(step: BoundStep, allocate: Allocate, slots: Slots, workspace: torch.Tensor | None) -> None:
    """One launch: its results are in their slots afterwards."""
    buffers = Buffers(tuple([slots[i] for i in step.args]), allocate(slots), step.constants)  # type: ignore[misc]
    step.executable.launch(buffers, workspace if step.executable.workspace_bytes else None)
    for slot, result in zip(step.results, buffers.results, strict=True):
        slots[slot] = result


def in_layout(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """The tensor itself where it has the memory format wanted, a copy where it has another."""
    if layout == ANY_LAYOUT:
        return tensor.contiguous()
    return tensor.contiguous(memory_format=MEMORY_FORMATS[layout])


def empty(spec: TensorSpec, layout: str, device: torch.device) -> torch.Tensor:
    """An uninitialised tensor of a spec in a memory format."""
    memory_format = MEMORY_FORMATS.get(layout, torch.contiguous_format) if len(spec.shape) == 4 else None
    if memory_format is None:
        return torch.empty(spec.shape, dtype=DTYPES[spec.dtype], device=device)
    return torch.empty(spec.shape, dtype=DTYPES[spec.dtype], device=device, memory_format=memory_format)


def _allocator(bound: BoundStep, device: torch.device) -> Allocate:
    """From the slots to one launch's results: new tensors, places in larger ones, Nones where the executable brings its own."""
    layout, specs, places = bound.step.layout, bound.specs, bound.places
    if places:
        return lambda slots: [
            empty(spec, layout, device) if place is None else result_slice(slots, place, layout, device)
            for spec, place in zip(specs, places, strict=True)
        ]
    if bound.executable.allocates_results:
        count = len(bound.results)
        return lambda _: [None] * count
    return lambda _: [empty(spec, layout, device) for spec in specs]


def result_slice(
    slots: list[torch.Tensor | None], place: ChannelSlice, layout: str, device: torch.device
) -> torch.Tensor:
    """A result's place in a larger value, which the first that lies in it brings into being."""
    whole = slots[place.slot]
    if whole is None:
        whole = slots[place.slot] = empty(place.spec, layout, device)
    return place.of(whole)
