"""Updates: parameters are updated while the backward pass goes on, each bucket as soon as nobody else wants its old values."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from convoy.program.bound_plan import BoundPlan
from convoy.program.cuda.recording import distinct_stream
from convoy.program.lifetimes import slot_users
from convoy.schedule import buckets
from convoy.training.allreduce.bucket_completion import BucketCompletion, all_written
from convoy.training.allreduce.overlapped_allreduce import OverlappedAllReduce
from convoy.training.capturable_optimizers import FUSED

BUCKET_BYTES = 4 << 20
"""Gradients that are updated together: enough to fill a device, little enough that most are done before the pass ends."""


EARLY_BYTES_US = 3e4
"""Bytes of parameters for each microsecond of a step from which their update begins during the backward pass. Updates disturb the
launches beside them: with 0.9e4 bytes GoogLeNet's step was 3 % slower for it, with 1.0e4 InceptionV3's 4 % (batch 32, bf16, H200:
`convoy.late_update` in bench/results/training-nvidia-h200.csv, commits 76e5ef6, b8b9169). AlexNet's step has some
ten times as many; what the update alone takes from its step is not measured."""


def early_update_pays(parameters: Sequence[nn.Parameter], step_us: float) -> bool:
    """Whether the update of some parameters is a large part of a step that takes so long; not where that is unknown."""
    return 0.0 < step_us * EARLY_BYTES_US <= sum(p.numel() * p.element_size() for p in parameters)


class ReadAfterUpdateError(RuntimeError):
    """Raised where a launch reads a parameter that was updated before: the update must wait for the end."""


class OverlappedUpdates:
    """The updates of a bound step's parameters, and after which launch each begins.

    A parameter may change when its gradient is there, averaged where several processes train, and the last launch that reads it
    was queued: the updates run on a stream of their own that waits for those launches, for the average, and for nothing else.
    Every element is updated by itself, so the results have the bits of one update at the end.

    Args:
        bound: loss, gradients and new buffers.
        parameters: those that get a gradient, in the order of the gradients, which are the outputs behind the loss.
        slots: of each parameter, the input that it is.
        optimizer: one whose update is elementwise (`capturable.FUSED`), and whose state is there.
        taken: streams that the step itself uses.
        overlap: what averages the gradients; its buckets are then those of the updates, and it is driven from here.
    """

    def __init__(
        self,
        bound: BoundPlan,
        parameters: Sequence[nn.Parameter],
        slots: Sequence[int],
        optimizer: torch.optim.Optimizer,
        taken: Sequence[torch.cuda.Stream] = (),
        overlap: OverlappedAllReduce | None = None,
    ) -> None:
        self._optimizer, self._steps, self._overlap = optimizer, bound.steps, overlap
        device = parameters[0].device
        self.stream = distinct_stream(device, taken) if device.type == "cuda" else None
        used = slot_users(bound.steps)
        gradients = bound.outputs[1 : 1 + len(parameters)]
        members = _members(parameters) if overlap is None else [list(map(gradients.index, b)) for b in overlap.buckets]
        self._buckets = [[(parameters[i], gradients[i]) for i in bucket] for bucket in members]
        waits = [
            {at for i in bucket for slot in (slots[i], gradients[i]) for at in used.get(slot, ())} for bucket in members
        ]
        # Buckets leave in one order, so that behind those of earlier ones a bucket's own launches say that it has left.
        self._completion = BucketCompletion(waits, self.stream, in_order=overlap is not None)
        self._updated: set[int] = set()

    def after(self, index: int, slots: Sequence[torch.Tensor | None]) -> None:
        """A launch was given to torch's current stream; begin the updates that nothing stands against any more."""
        read = (slots[slot] for slot in self._steps[index].args)
        if self._updated and any(t is not None and t.untyped_storage().data_ptr() in self._updated for t in read):
            raise ReadAfterUpdateError("a launch reads a parameter in another shape after its update was queued")
        if self._overlap is not None:
            self._overlap.after(index, slots)
        complete = self._completion.after(index)
        if not complete:
            return
        with torch.cuda.stream(self.stream):
            if self.stream is not None:
                for event in self._completion.events(complete):
                    self.stream.wait_event(event)
            for number in complete:
                if self._overlap is not None:
                    self._overlap.wait_for(number)
                self._update(self._buckets[number], slots)

    def end(self) -> None:
        """What follows on torch's current stream finds the new parameters."""
        if self._overlap is not None:
            self._overlap.end()
        self._completion.end()
        self._updated.clear()
        if self.stream is not None:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)

    def _update(self, bucket: Sequence[tuple[nn.Parameter, int]], slots: Sequence[torch.Tensor | None]) -> None:
        for parameter, slot in bucket:
            parameter.grad = slots[slot]
        with _only(self._optimizer, {id(parameter) for parameter, _ in bucket}):
            self._optimizer.step()
        self._updated.update(parameter.untyped_storage().data_ptr() for parameter, _ in bucket)


def _members(parameters: Sequence[nn.Parameter]) -> list[list[int]]:
    """Which parameters are updated together, the last layers' first."""
    back = list(range(len(parameters)))[::-1]
    sizes = [parameters[i].numel() * parameters[i].element_size() for i in back]
    found = buckets(sizes, [parameters[i].dtype for i in back], BUCKET_BYTES)
    return [[back[i] for i in bucket] for bucket in found]


def make_overlapped_updates(
    bound: BoundPlan,
    parameters: Sequence[nn.Parameter],
    slots: Sequence[int],
    optimizer: torch.optim.Optimizer,
    taken: Sequence[torch.cuda.Stream] = (),
    overlap: OverlappedAllReduce | None = None,
) -> OverlappedUpdates | None:
    """`OverlappedUpdates`; None if the optimizer's update may not be elementwise, or if no launch makes one of the gradients."""
    if type(optimizer) not in FUSED or not all_written(bound, len(parameters)):
        return None
    return OverlappedUpdates(bound, parameters, slots, optimizer, taken, overlap)


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
