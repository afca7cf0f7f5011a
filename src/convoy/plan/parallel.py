"""Steps spread over streams."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from convoy.plan.plan import Step
from convoy.schedule import EVENT_US, CostModel, Sharing, dag_of, fit_capacity, spread


def parallel(
    steps: Sequence[Step], streams: int, shares: Sequence[float] = (), model: CostModel | None = None
) -> tuple[Step, ...]:
    """The same steps in the order in which to launch them on several streams, with `stream` and `waits` set.

    Args:
        steps: in an order that works on one stream.
        streams: most streams to use; with 1 the steps stay as they are.
        shares: part of the device that each step takes, where known.
        model: how steps slow one another; None: not at all.
    """
    if streams <= 1:
        return tuple(replace(step, stream=0, waits=()) for step in steps)
    dag = dag_of(steps, [step.median_us for step in steps], shares)
    placed = spread(dag, streams, model=model)
    return tuple(replace(steps[p.launch], stream=p.stream, waits=p.waits) for p in placed)


def contention(
    steps: Sequence[Step], shares: Sequence[float], measured: Sequence[tuple[Sequence[Step], float]]
) -> Sharing:
    """How steps slow one another, fitted to what whole schedules of them took on the device.

    Args:
        steps: in the order of the shares.
        shares: part of the device that each takes.
        measured: schedules of the same steps, and their times, microseconds.
    """
    index = {step.results: at for at, step in enumerate(steps)}
    orders = [
        ([(index[step.results], step.stream, step.waits) for step in schedule], took) for schedule, took in measured
    ]
    return Sharing(fit_capacity(dag_of(steps, [step.median_us for step in steps], shares), orders, EVENT_US))


def critical_us(steps: Sequence[Step]) -> float:
    """Time of the longest chain of steps that need one another: no number of streams can do better."""
    return dag_of(steps, [step.median_us for step in steps]).critical_us


def device_us(steps: Sequence[Step], shares: Sequence[float]) -> float:
    """Time of the same work on a device that is full all the while."""
    return dag_of(steps, [step.median_us for step in steps], shares).device_us
