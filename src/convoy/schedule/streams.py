"""Assigns launches to streams: list scheduling by distance to the sink, with events only where an edge crosses streams.

The rule is Graham's list scheduling with critical-path priorities (Coffman and Graham, 1972): of the ready launches, the one
with the longest remaining path goes first, to the stream on which it can start earliest. So the critical path never waits for
other work. If that is not the shortest order, one of a few orders with slightly changed priorities mostly is.

Without a contention model, launches do not slow each other; with one, launches off the critical path are admitted only while
the device has free resources (`schedule.admission`). Either way the model only proposes: several schedules are made, and
measurements on the device decide.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from convoy.schedule.admission import HeldBack, Starts, admit
from convoy.schedule.contention import ContentionModel
from convoy.schedule.dag import Dag

EVENT_US: Final = 0.8
"""Cost of an edge between two streams of a captured graph for the waiting launch: a rough value, which only orders
candidates; schedules are compared by measurement."""


@dataclass(frozen=True, slots=True)
class ScheduledLaunch:
    """A launch with its place in the schedule.

    Attributes:
        launch: its index in the `Dag`.
        stream: index of its stream; the critical path's first launch is on 0.
        waits: positions, in launch order, of launches on other streams that it must wait for; waits that follow from others,
            or from its own stream's order, are left out.
        start_us: its start under the model.
    """

    launch: int
    stream: int
    waits: tuple[int, ...]
    start_us: float


MAX_ORDERS: Final = 32
"""Orders tried. Of 60 random nets of six launches on two streams, the plain priorities alone find the optimum of 42, these of
56 (tests); a training step of 400 launches takes a third of a second."""

MAX_CONTENTION_WORK: Final = 4800
"""Orders times launches that are tried under a contention model: 8 orders of 600 launches, which take a second."""

PRIORITY_CHANGES: Final = (0.2, 0.5, 0.9)
"""Largest relative changes of a launch's priority, in turn: small ones for long nets, large ones for short ones."""


def assign_streams(
    dag: Dag, streams: int, tries: int = MAX_ORDERS, model: ContentionModel | None = None
) -> list[ScheduledLaunch]:
    """Launches in launch order, each with its stream and the events that it waits for.

    Args:
        dag: the dependencies; launches with a lane run on it, which may lie beyond the streams.
        streams: most streams to use.
        tries: orders to try, first the one by plain distances; the shortest wins, of equals the first.
        model: how launches slow each other; None: not at all.
    """
    distances = dag.distances_us()
    total = max([streams, *(lane + 1 for lane in dag.lanes.values())])

    def place(priorities: Sequence[float]) -> tuple[float, Starts, HeldBack]:
        if model is not None:
            ways = [admit(dag, streams, priorities, model, EVENT_US, holds=holds) for holds in (True, False)]
            return min(ways, key=lambda way: way[0])
        begun = _place(dag, streams, total, priorities)
        return _end(dag, begun), begun, {}

    best, begun, holds = place(distances)
    bound = dag.critical_us if model is None else dag.bound_us
    draw = random.Random(0)
    if model is not None:
        tries = min(tries, MAX_CONTENTION_WORK // max(1, len(dag.needs)))
    for index in range(tries - 1 if total > 1 else 0):
        if best <= bound + EVENT_US:
            break
        most = PRIORITY_CHANGES[index % len(PRIORITY_CHANGES)]
        end, other, held = place([distance * (1 + draw.uniform(-most, most)) for distance in distances])
        if end < best - EVENT_US:
            best, begun, holds = end, other, held
    return _with_waits(dag, begun, holds, total)


def _end(dag: Dag, begun: Starts) -> float:
    return max((start + dag.times_us[launch] for launch, (start, _) in begun.items()), default=0.0)


def _place(dag: Dag, streams: int, total: int, priorities: Sequence[float]) -> Starts:
    """Start and stream of each launch: of the ready ones, the one with the highest priority first."""
    followers = dag.followers()
    missing = [len(needs) for needs in dag.needs]
    ready = {index for index, count in enumerate(missing) if not count}
    free_us = [0.0] * total
    last = [-1] * total
    begun: Starts = {}
    while ready:
        chosen = max(ready, key=lambda index: (priorities[index], -index))
        ready.remove(chosen)
        lane = dag.lanes.get(chosen)
        start, stream = _earliest(dag, chosen, begun, free_us, last, range(streams) if lane is None else (lane,))
        begun[chosen] = (start, stream)
        free_us[stream], last[stream] = start + dag.times_us[chosen], chosen
        for follower in followers[chosen]:
            missing[follower] -= 1
            if not missing[follower]:
                ready.add(follower)
    return begun


def _earliest(
    dag: Dag, launch: int, begun: Starts, free_us: Sequence[float], last: Sequence[int], allowed: Iterable[int]
) -> tuple[float, int]:
    """Start and stream of a launch: the earliest start; of equals the stream whose last launch it needs, then the lowest."""
    options: list[tuple[float, bool, int]] = []
    for stream in allowed:
        start = free_us[stream]
        for before in dag.needs[launch]:
            began, where = begun[before]
            start = max(start, began + dag.times_us[before] + (EVENT_US if where != stream else 0.0))
        options.append((start, last[stream] not in dag.needs[launch], stream))
    start, _, stream = min(options)
    return start, stream


def _with_waits(dag: Dag, begun: Starts, holds: HeldBack, streams: int) -> list[ScheduledLaunch]:
    """Launches in order of start, with the fewest events: for dependencies, and for launches that were held back."""
    order = sorted(begun, key=lambda launch: (begun[launch][0], launch))
    position = {launch: at for at, launch in enumerate(order)}
    clocks: list[list[int]] = []
    newest = [[-1] * streams for _ in range(streams)]
    placed: list[ScheduledLaunch] = []
    for at, launch in enumerate(order):
        start, stream = begun[launch]
        known = list(newest[stream])
        waits: list[int] = []
        for before in sorted({position[b] for b in (*dag.needs[launch], *holds.get(launch, ()))}, reverse=True):
            if before > known[placed[before].stream]:
                waits.append(before)
                known = [max(pair) for pair in zip(known, clocks[before], strict=True)]
        known[stream] = at
        clocks.append(known)
        newest[stream] = known
        placed.append(ScheduledLaunch(launch, stream, tuple(sorted(waits)), start))
    return placed


def finished_before(placed: Sequence[tuple[int, Sequence[int]]], streams: int) -> list[list[int]]:
    """For each launch, by stream, the last position that has certainly finished when it starts; -1: none.

    Args:
        placed: stream and waits of each launch, in launch order.
        streams: number of streams.
    """
    newest = [[-1] * streams for _ in range(streams)]
    found: list[list[int]] = []
    after: list[list[int]] = []
    for at, (stream, waits) in enumerate(placed):
        known = list(newest[stream])
        for before in waits:
            known = [max(pair) for pair in zip(known, after[before], strict=True)]
        found.append(known)
        done = list(known)
        done[stream] = at
        after.append(done)
        newest[stream] = done
    return found
