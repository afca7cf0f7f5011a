"""A plan's steps on several streams."""

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
    """The same steps in launch order on several streams, with `stream` and `waits` set.

    Args:
        steps: in an order that is valid on one stream.
        streams: most streams to use; with 1 the steps stay as they are.
        shares: share of the device that each step takes, if known.
        model: how steps slow each other; None: not at all.
        collectives: launches that send results to other processes, on a stream of their own. They are no steps of the plan:
            the program starts each as soon as its arguments exist. Their dependencies count for the critical path.
        home: steps, by index, that stay on stream 0, so that they share its memory.
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
    """Let each step that draws random numbers wait for the one before it: a seed then gives the same numbers on any streams."""
    draws = [index for index, step in enumerate(steps) if step.pattern == "draw"]
    needs = list(dag.needs)
    for before, after in pairwise(draws):
        needs[after] = tuple(sorted({*needs[after], before}))
    return replace(dag, needs=tuple(needs))


def fit_contention(
    steps: Sequence[Step], shares: Sequence[float], measured: Sequence[tuple[Sequence[Step], float]]
) -> CapacityModel:
    """The contention model fitted to measured times of whole schedules.

    Args:
        steps: in the order of the shares.
        shares: share of the device that each takes.
        measured: schedules of the same steps, and their times, microseconds.
    """
    index = {step.results: at for at, step in enumerate(steps)}
    orders = [
        ([(index[step.results], step.stream, step.waits) for step in schedule], took) for schedule, took in measured
    ]
    return CapacityModel(fit_capacity(dag_of(steps, [step.median_us for step in steps], shares), orders, EVENT_US))


def critical_us(steps: Sequence[Step]) -> float:
    """Time of the longest chain of dependent steps: no number of streams can be faster."""
    return dag_of(steps, [step.median_us for step in steps]).critical_us


def device_us(steps: Sequence[Step], shares: Sequence[float]) -> float:
    """Time of the same work on a fully used device."""
    return dag_of(steps, [step.median_us for step in steps], shares).device_us


def exposed_us(steps: Sequence[Step], collectives: Sequence[Collective]) -> float:
    """How long the last collective runs after the last step, without contention; 0 without collectives.

    Each begins when its arguments exist and the previous one has ended.

    Args:
        steps: a schedule.
        collectives: in sending order.
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
