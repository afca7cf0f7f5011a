"""Updates: parameters are updated while the backward pass goes on, each bucket as soon as nobody else wants its old values."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from convoy.program.bind import Bound
from convoy.program.capturable import FUSED
from convoy.program.recording import stream_beside
from convoy.schedule import buckets

BUCKET_BYTES = 4 << 20
"""Gradients that are updated together: enough to fill a device, little enough that most are done before the pass ends."""


class OvertakenError(RuntimeError):
    """Raised where a launch reads a parameter that was updated before: the update must wait for the end."""


class Updates:
    """The updates of a bound step's parameters, and after which launch each begins.

    A parameter may change when its gradient is there and the last launch that reads it was queued: the updates run on a stream
    of their own that waits for those launches and for nothing else. Every element is updated by itself, so the results have the
    bits of one update at the end.

    Args:
        bound: loss, gradients and new buffers.
        parameters: those that get a gradient, in the order of the gradients, which are the outputs behind the loss.
        slots: of each parameter, the input that it is.
        optimizer: one whose update is elementwise (`capturable.FUSED`), and whose state is there.
        taken: streams that the step itself uses.
    """

    def __init__(
        self,
        bound: Bound,
        parameters: Sequence[nn.Parameter],
        slots: Sequence[int],
        optimizer: torch.optim.Optimizer,
        taken: Sequence[torch.cuda.Stream] = (),
    ) -> None:
        self._optimizer, self._steps = optimizer, bound.steps
        device = parameters[0].device
        self.stream = stream_beside(device, taken) if device.type == "cuda" else None
        used = _users(bound)
        gradients = bound.outputs[1 : 1 + len(parameters)]
        back = list(range(len(parameters)))[::-1]
        sizes = [p.numel() * p.element_size() for p in parameters]
        found = buckets([sizes[i] for i in back], [parameters[i].dtype for i in back], BUCKET_BYTES)
        self._parts: dict[int, list[list[tuple[nn.Parameter, int]]]] = {}
        self._waits: dict[int, set[int]] = {}
        for bucket in found:
            members = [back[i] for i in bucket]
            waits = {at for i in members for slot in (slots[i], gradients[i]) for at in used.get(slot, ())}
            begin = max(waits)
            self._parts.setdefault(begin, []).append([(parameters[i], gradients[i]) for i in members])
            self._waits.setdefault(begin, set()).update(waits)
        self._marked = {at for waits in self._waits.values() for at in waits}
        self._events: dict[int, torch.Event] = {}
        self._updated: set[int] = set()

    def after(self, index: int, slots: Sequence[torch.Tensor | None]) -> None:
        """A launch was given to torch's current stream; begin the updates that nothing stands against any more."""
        read = (slots[slot] for slot in self._steps[index].args)
        if self._updated and any(t is not None and t.untyped_storage().data_ptr() in self._updated for t in read):
            raise OvertakenError("a launch reads a parameter in another shape after its update was queued")
        if self.stream is not None and index in self._marked:
            self._events[index] = torch.cuda.current_stream(self.stream.device).record_event()
        if index not in self._parts:
            return
        with torch.cuda.stream(self.stream):
            if self.stream is not None:
                for at in sorted(self._waits[index]):
                    self.stream.wait_event(self._events[at])
            for part in self._parts[index]:
                self._update(part, slots)

    def end(self) -> None:
        """What follows on torch's current stream finds the new parameters."""
        self._events.clear()
        self._updated.clear()
        if self.stream is not None:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)

    def _update(self, part: Sequence[tuple[nn.Parameter, int]], slots: Sequence[torch.Tensor | None]) -> None:
        for parameter, slot in part:
            parameter.grad = slots[slot]
        with _only(self._optimizer, {id(parameter) for parameter, _ in part}):
            self._optimizer.step()
        self._updated.update(parameter.untyped_storage().data_ptr() for parameter, _ in part)


def updates_of(
    bound: Bound,
    parameters: Sequence[nn.Parameter],
    slots: Sequence[int],
    optimizer: torch.optim.Optimizer,
    taken: Sequence[torch.cuda.Stream] = (),
) -> Updates | None:
    """`Updates`, or None where an optimizer's update is not known to be elementwise, or a launch makes not each gradient."""
    made = {slot for step in bound.steps for slot in step.results}
    if type(optimizer) not in FUSED or not set(bound.outputs[1 : 1 + len(parameters)]) <= made:
        return None
    return Updates(bound, parameters, slots, optimizer, taken)


def _users(bound: Bound) -> dict[int, list[int]]:
    """For each slot, the launches that read or write it."""
    found: dict[int, list[int]] = {}
    for at, step in enumerate(bound.steps):
        for slot in dict.fromkeys(step.touched()):
            found.setdefault(slot, []).append(at)
    return found


@contextmanager
def _only(optimizer: torch.optim.Optimizer, wanted: set[int]) -> Generator[None]:
    """Let an optimizer's groups hold some of their parameters alone."""
    before = [group["params"] for group in optimizer.param_groups]
    try:
        for group, parameters in zip(optimizer.param_groups, before, strict=True):
            group["params"] = [parameter for parameter in parameters if id(parameter) in wanted]
        yield
    finally:
        for group, parameters in zip(optimizer.param_groups, before, strict=True):
            group["params"] = parameters
