"""Steps spread over streams."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import pairwise

from convoy.plan.plan import Step
from convoy.schedule.collectives import NCCL_SHARE, Collective
from convoy.schedule.contention import CapacityModel, ContentionModel, fit_capacity
from convoy.schedule.dag import Dag, dag_of
from convoy.schedule.streams import EVENT_US, MAX_ORDERS, assign_streams


def parallel_steps(
    steps: Sequence[Step],
    streams: int,
    shares: Sequence[float] = (),
    model: ContentionModel | None = None,
    collectives: Sequence[Collective] = (),
    *,
    home: Collection[int] = (),
    tries: int = MAX_ORDERS,
) -> tuple[Step, ...]:
    """The same steps in the order in which to launch them on several streams, with `stream` and `waits` set.

    Args:
        steps: in an order that works on one stream.
        streams: most streams to use; with 1 the steps stay as they are.
        shares: part of the device that each step takes, where known.
        model: how steps slow one another; None: not at all.
        collectives: what sends results to other processes, on a stream of its own. They have no place in a plan, whose program
            begins each as soon as all that it sends is there; but what they wait for is on the longest way, and goes first.
        home: steps, by index, that stay on stream 0, whose memory then serves them one after another.
        tries: orders to try (`assign_streams`).
    """
    if streams <= 1:
        return tuple(replace(step, stream=0, waits=()) for step in steps)
    count = len(steps)
    times = [*(step.median_us for step in steps), *(one.time_us for one in collectives)]
    taken = [*shares, *(NCCL_SHARE for _ in collectives)] if shares else ()
    lanes = dict.fromkeys(range(count, len(times)), streams) | dict.fromkeys(home, 0)
    dag = _draws_in_order(steps, replace(dag_of([*steps, *collectives], times, taken), lanes=lanes))
    placed = assign_streams(dag, streams, tries, model)
    kept = {at: index for index, at in enumerate(at for at, p in enumerate(placed) if p.launch < count)}
    return tuple(
        replace(steps[p.launch], stream=p.stream, waits=tuple(kept[before] for before in p.waits))
        for p in placed
        if p.launch < count
    )


def _draws_in_order(steps: Sequence[Step], dag: Dag) -> Dag:
    """Let each step that draws random numbers wait for the one before it: a seed gives the same numbers on any streams."""
    draws = [index for index, step in enumerate(steps) if step.pattern == "draw"]
    needs = list(dag.needs)
    for before, after in pairwise(draws):
        needs[after] = tuple(sorted({*needs[after], before}))
    return replace(dag, needs=tuple(needs))


def fit_contention(
    steps: Sequence[Step], shares: Sequence[float], measured: Sequence[tuple[Sequence[Step], float]]
) -> CapacityModel:
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
    return CapacityModel(fit_capacity(dag_of(steps, [step.median_us for step in steps], shares), orders, EVENT_US))


def critical_us(steps: Sequence[Step]) -> float:
    """Time of the longest chain of steps that need one another: no number of streams can do better."""
    return dag_of(steps, [step.median_us for step in steps]).critical_us


def device_us(steps: Sequence[Step], shares: Sequence[float]) -> float:
    """Time of the same work on a device that is full all the while."""
    return dag_of(steps, [step.median_us for step in steps], shares).device_us


def exposed_us(steps: Sequence[Step], collectives: Sequence[Collective]) -> float:
    """How long the last collective goes on after the last step, as if nothing slowed anything; 0 without any.

    Each begins when all that it sends is there and the one before it has ended.

    Args:
        steps: a schedule.
        collectives: in the order in which they are sent.
    """
    free: dict[int, float] = {}
    ended: list[float] = []
    made: dict[str, float] = {}
    for step in steps:
        begun = max((free.get(step.stream, 0.0), *(ended[before] for before in step.waits)))
        ended.append(begun + step.median_us)
        free[step.stream] = ended[-1]
        made.update((name.partition("@")[0], ended[-1]) for name in step.results)
    sent = 0.0
    for one in collectives:
        sent = max((sent, *(made.get(name, 0.0) for name in one.args))) + one.time_us
    return max(0.0, sent - max(ended, default=0.0))
