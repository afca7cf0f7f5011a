"""Overlap: gradients are averaged over processes while the backward pass goes on, each bucket as soon as it is complete."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from convoy.program.bind import Bound
from convoy.program.gradients import Averages
from convoy.schedule import buckets


class Overlap:
    """The all-reduces of a bound step, and after which launch each begins.

    The buckets are those of `program.gradients.average`: the same values travel together, so the averages have the same bits.

    Args:
        bound: loss, gradients and new buffers.
        count: number of gradients; they are the outputs behind the loss.
        averages: what sends them.
    """

    def __init__(self, bound: Bound, count: int, averages: Averages) -> None:
        self._averages = averages
        specs = {slot: spec for step in bound.steps for slot, spec in zip(step.results, step.specs, strict=True)}
        made = {slot: index for index, step in enumerate(bound.steps) for slot in step.results}
        back = bound.outputs[count:0:-1]
        found = buckets([specs[slot].size_bytes for slot in back], [specs[slot].dtype for slot in back])
        self._buckets = [tuple(back[index] for index in bucket) for bucket in found]
        self._makers = [tuple(dict.fromkeys(made[slot] for slot in bucket)) for bucket in self._buckets]
        ready = [max(makers) for makers in self._makers]
        # A collective is begun in the same order by every process, so one that is ready early waits for those before it.
        self._begins: dict[int, list[int]] = {}
        latest = -1
        for number, at in enumerate(ready):
            latest = max(latest, at)
            self._begins.setdefault(latest, []).append(number)
        self._marked = {index for makers in self._makers for index in makers}
        self._events: dict[int, torch.cuda.Event] = {}

    @staticmethod
    def fits(bound: Bound, count: int) -> bool:
        """Whether each gradient is made by a launch; one that is an input or a constant is nothing to wait for."""
        made = {slot for step in bound.steps for slot in step.results}
        return set(bound.outputs[1 : count + 1]) <= made

    def after(self, index: int, slots: Sequence[torch.Tensor | None]) -> None:
        """A launch was given to torch's current stream; begin the buckets that are complete with it."""
        stream = self._averages.stream
        if stream is not None and index in self._marked:
            self._events[index] = torch.cuda.current_stream(stream.device).record_event()
        for number in self._begins.get(index, ()):
            bucket = [slots[slot] for slot in self._buckets[number]]
            made = [self._events[maker] for maker in self._makers[number]] if stream is not None else []
            self._averages.begin(bucket, made)  # type: ignore[arg-type]

    def end(self) -> None:
        """What follows on torch's current stream finds the averages."""
        self._events.clear()
        self._averages.end()
