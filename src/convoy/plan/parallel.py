"""Steps spread over streams."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from convoy.plan.plan import Step
from convoy.schedule import dag_of, spread


def parallel(steps: Sequence[Step], streams: int) -> tuple[Step, ...]:
    """The same steps in the order in which to launch them on several streams, with `stream` and `waits` set.

    Args:
        steps: in an order that works on one stream.
        streams: most streams to use; with 1 the steps stay as they are.
    """
    if streams <= 1:
        return tuple(replace(step, stream=0, waits=()) for step in steps)
    placed = spread(dag_of(steps, [step.median_us for step in steps]), streams)
    return tuple(replace(steps[p.launch], stream=p.stream, waits=p.waits) for p in placed)


def critical_us(steps: Sequence[Step]) -> float:
    """Time of the longest chain of steps that need one another: no number of streams can do better."""
    return dag_of(steps, [step.median_us for step in steps]).critical_us
