"""When buckets of a step's gradients are complete, and what a stream beside the step's own waits for to use them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch

from convoy.program.bound_plan import BoundPlan


class BucketCompletion:
    """Follows a bound step's launches and says with which of them each bucket is complete.

    On a GPU the launches that a bucket waits for are marked on torch's current stream, so that another stream can wait for
    them and for nothing else.

    Args:
        waits: for each bucket, the launches that it waits for; at least one each.
        stream: the stream on which buckets are used; None on a CPU.
        in_order: whether no bucket is complete before those in front of it.
    """

    def __init__(
        self, waits: Sequence[Collection[int]], stream: torch.cuda.Stream | None = None, *, in_order: bool = False
    ) -> None:
        self._waits, self._stream = waits, stream
        self._buckets: dict[int, list[int]] = {}
        latest = -1
        for number, launches in enumerate(waits):
            last = max(launches)
            latest = max(latest, last) if in_order else last
            self._buckets.setdefault(latest, []).append(number)
        self._marked = {index for launches in waits for index in launches}
        self._events: dict[int, torch.Event] = {}

    def after(self, index: int) -> Sequence[int]:
        """A launch was given to torch's current stream: the numbers of the buckets that are complete with it."""
        if self._stream is not None and index in self._marked:
            self._events[index] = torch.cuda.current_stream(self._stream.device).record_event()
        return self._buckets.get(index, ())

    def events(self, numbers: Iterable[int]) -> list[torch.Event]:
        """What the stream waits for to use these buckets; nothing on a CPU."""
        if self._stream is None:
            return []
        return [self._events[index] for index in sorted({index for n in numbers for index in self._waits[n]})]

    def end(self) -> None:
        """All were launched: the marks are not wanted any more."""
        self._events.clear()


def slot_writers(bound: BoundPlan) -> dict[int, int]:
    """For each slot that a launch writes, the launch; inputs and constants have none."""
    return {slot: index for index, step in enumerate(bound.steps) for slot in step.results}


def all_written(bound: BoundPlan, count: int) -> bool:
    """Whether each of the gradients, the outputs behind the loss, is made by a launch: else there is nothing to wait for."""
    return set(bound.outputs[1 : 1 + count]) <= slot_writers(bound).keys()
