"""EagerProgram: launches bound steps one after another on torch's current stream. A CUDA graph captures it."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from convoy.engines.base import Buffers
from convoy.engines.gpu.device_tensors import aligned_on_gpu
from convoy.engines.subgraph import torch_format
from convoy.engines.torch_operators import DTYPES
from convoy.problem import ANY_LAYOUT, TensorSpec
from convoy.program.bound_plan import BoundPlan, BoundStep, ChannelSlice
from convoy.program.shared_memory import present_memory

Slots = list[torch.Tensor | None]
"""Values of a run, by slot; None before a value is made and after its last use."""

Allocate = Callable[[Slots], Slots]
"""Slots → the results of one launch."""


class LaunchObserver(Protocol):
    """Called after every launch of a program, for example to send gradients to other processes as soon as they are made."""

    def after(self, index: int, slots: Sequence[torch.Tensor | None]) -> None:
        """Launch `index` was given to torch's current stream, and its results are in their slots."""
        ...

    def end(self) -> None:
        """All steps were launched; torch's current stream is the caller's."""
        ...


class EagerProgram:
    """A bound plan that runs step by step. Safe to call from several threads at once.

    Results are new tensors of PyTorch unless their executable allocates them, so outputs never share memory with those of another
    call. Each thread has one workspace, kept from call to call.

    Args:
        bound: the plan with its executables.
        device: the device to run on.

    Attributes:
        recordable: False after a failed capture of its launches as a CUDA graph.
    """

    def __init__(self, bound: BoundPlan, device: torch.device) -> None:
        self.bound = bound
        self.device = device
        self.recordable = True
        self._local = threading.local()
        self._shared = present_memory()
        self._input_slots = len(bound.inputs)
        self._blank = [None] * (len(bound.slot_names) - self._input_slots)
        self._steps = [(step, _allocator(step, device)) for step in bound.steps]

    def __call__(self, inputs: Sequence[torch.Tensor], observer: LaunchObserver | None = None) -> list[torch.Tensor]:
        """Run on inputs of the plan's specs; returns the graph's outputs in order."""
        slots: list[torch.Tensor | None] = [
            in_layout(tensor, layout) for tensor, (_, layout) in zip(inputs, self.bound.inputs, strict=True)
        ]
        slots.extend(self._blank)
        workspace = self._workspace()
        for index, (step, allocate) in enumerate(self._steps):
            run_step(step, allocate, slots, workspace)
            if observer is not None:
                observer.after(index, slots)
            for slot in step.frees:
                slots[slot] = None
        if observer is not None:
            observer.end()
        return [slots[slot] for slot in self.bound.outputs]  # pyright: ignore[reportReturnType]

    def with_bound(self, bound: BoundPlan) -> EagerProgram:
        """A program of another form of the plan, with the same slots; both share streams and workspaces."""
        made = copy.copy(self)
        made.bound = bound
        made._steps = [(step, _allocator(step, self.device)) for step in bound.steps]
        return made

    @property
    def streams(self) -> tuple[torch.cuda.Stream, ...]:
        """Side streams that the program uses; none here."""
        return ()

    def workspace(self) -> object:
        """The scratch memory of this thread's calls. A CUDA graph of such a call must keep it alive."""
        return self._workspace()

    def use_workspace(self, workspace: torch.Tensor) -> None:
        """Use this scratch memory in this thread's calls from now on; it has at least the plan's `workspace_bytes`."""
        self._local.workspace = workspace

    def _workspace(self) -> torch.Tensor | None:
        if not self.bound.workspace_bytes:
            return None
        if self._shared is not None and self.device.type == "cpu":
            return self._shared.scratch(self.bound.workspace_bytes, self.device)
        workspace = getattr(self._local, "workspace", None)
        if workspace is None:
            workspace = torch.empty(self.bound.workspace_bytes, dtype=torch.uint8, device=self.device)
            self._local.workspace = workspace
        return workspace


def run_step(step: BoundStep, allocate: Allocate, slots: Slots, workspace: torch.Tensor | None) -> None:
    """Launch one step; afterwards its results are in their slots."""
    buffers = Buffers(tuple([slots[i] for i in step.args]), allocate(slots), step.constants)  # pyright: ignore[reportArgumentType]
    step.executable.launch(buffers, workspace if step.executable.workspace_bytes else None)
    views = step.executable.allocates_results  # PyTorch's results may be views, which begin anywhere
    for slot, result in zip(step.results, buffers.results, strict=True):
        slots[slot] = aligned_on_gpu(result) if views and result is not None else result


def in_layout(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """The tensor itself if it has this memory format and its address suits kernels, else a copy."""
    if layout == ANY_LAYOUT:
        return aligned_on_gpu(tensor.contiguous())
    return aligned_on_gpu(tensor.contiguous(memory_format=torch_format(layout, tensor.dim())))


def empty(spec: TensorSpec, layout: str, device: torch.device) -> torch.Tensor:
    """An uninitialized tensor of a spec in a memory format."""
    memory_format = torch_format(layout, len(spec.shape))
    return torch.empty(spec.shape, dtype=DTYPES[spec.dtype], device=device, memory_format=memory_format)


def _allocator(bound: BoundStep, device: torch.device) -> Allocate:
    """Allocates the results of one launch: new tensors, slices of larger ones, or None if the executable allocates."""
    layout, specs, slices = bound.step.layout, bound.specs, bound.slices
    if slices:
        return lambda slots: [
            empty(spec, layout, device) if part is None else result_slice(slots, part, layout, device)
            for spec, part in zip(specs, slices, strict=True)
        ]
    if bound.executable.allocates_results:
        count = len(bound.results)
        return lambda _: [None] * count
    return lambda _: [empty(spec, layout, device) for spec in specs]


def result_slice(slots: Slots, part: ChannelSlice, layout: str, device: torch.device) -> torch.Tensor:
    """The slice of a larger value in which a result is written. The first such result allocates the larger value."""
    whole = slots[part.slot]
    if whole is None:
        whole = slots[part.slot] = empty(part.spec, layout, device)
    return part.of(whole)
