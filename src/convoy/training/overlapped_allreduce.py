"""Overlap: gradients are averaged over processes while the backward pass goes on, each bucket as soon as it is complete."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from convoy.program.bound_plan import BoundPlan
from convoy.schedule import allreduce_buckets
from convoy.training.bucket_completion import BucketCompletion, slot_writers
from convoy.training.gradient_allreduce import GradientAllReduce


class OverlappedAllReduce:
    """The all-reduces of a bound step, and after which launch each begins.

    The buckets are those of `program.gradients.average`: the same values travel together, so the averages have the same bits.

    Args:
        bound: loss, gradients and new buffers.
        count: number of gradients; they are the outputs behind the loss.
        averages: what sends them.

    Attributes:
        buckets: the slots of the gradients that travel together, in the order in which they leave.
    """

    def __init__(self, bound: BoundPlan, count: int, averages: GradientAllReduce) -> None:
        self._averages = averages
        specs = {slot: spec for step in bound.steps for slot, spec in zip(step.results, step.specs, strict=True)}
        made = slot_writers(bound)
        back = bound.outputs[count:0:-1]
        found = allreduce_buckets([specs[slot].size_bytes for slot in back], [specs[slot].dtype for slot in back])
        self.buckets = [tuple(back[index] for index in bucket) for bucket in found]
        waits = [{made[slot] for slot in bucket} for bucket in self.buckets]
        # A collective is begun in the same order by every process, so one that is ready early waits for those before it.
        self._completion = BucketCompletion(waits, averages.stream, in_order=True)
        self._arrivals: dict[int, torch.Event | None] = {}

    def restart(self) -> None:
        """A step begins: nothing is under way, also where the last one was given up."""
        self._averages.restart()
        self._completion.end()
        self._arrivals.clear()

    def after(self, index: int, slots: Sequence[torch.Tensor | None]) -> None:
        """A launch was given to torch's current stream; begin the buckets that are complete with it."""
        for number in self._completion.after(index):
            bucket = [slots[slot] for slot in self.buckets[number]]
            self._averages.begin(bucket, self._completion.events([number]))  # pyright: ignore[reportArgumentType]
            self._arrivals[number] = self._averages.mark()

    def wait_for(self, number: int) -> None:
        """What follows on torch's current stream finds the averages of a bucket that has begun."""
        arrival, stream = self._arrivals[number], self._averages.stream
        if arrival is None or stream is None:
            self._averages.receive()
        else:
            torch.cuda.current_stream(stream.device).wait_event(arrival)

    def end(self) -> None:
        """What follows on torch's current stream finds the averages."""
        self._completion.end()
        self._averages.end()
        self._arrivals.clear()
