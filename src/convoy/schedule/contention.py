"""How launches that run at the same time slow one another, as a model; and how long a given schedule takes under it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from convoy.schedule.dag import Dag

_EPSILON_US = 1e-9
"""Microseconds of work below which a launch has ended: what rounding leaves."""


class ContentionModel(Protocol):
    """How fast launches proceed beside one another."""

    def rate(self, shares: Sequence[float]) -> float:
        """Speed of each of the launches that run together, 1 as alone.

        Args:
            shares: the part of the device that each takes, 0..1.
        """
        ...

    def has_room(self, shares: Sequence[float], share: float) -> bool:
        """Whether a further launch may begin beside some."""
        ...


@dataclass(frozen=True, slots=True)
class CapacityModel:
    """Launches that fit on the device together take the longest one's time; others are slowed alike: no work is lost or won.

    Attributes:
        capacity: sum of shares from which launches slow one another. 1 by the book; more where kernels do not use what they
            hold (latency, memory), less where they meet elsewhere (L2, bandwidth): it is fitted to measured schedules.
    """

    capacity: float = 1.0

    def rate(self, shares: Sequence[float]) -> float:
        """1 while there is room, and then less by how much is asked for too much."""
        wanted = sum(shares)
        return 1.0 if wanted <= self.capacity else self.capacity / wanted

    def has_room(self, shares: Sequence[float], share: float) -> bool:
        """Whether all of them fit; beside nothing, anything does."""
        return not shares or sum(shares) + share <= self.capacity


class RunningLaunches:
    """Launches under way: how much of each is left, as time passes.

    Args:
        dag: their times and shares.
        model: how they slow one another.
    """

    def __init__(self, dag: Dag, model: ContentionModel) -> None:
        self._dag, self._model = dag, model
        self.left_us: dict[int, float] = {}
        self.now_us = 0.0

    def shares(self) -> list[float]:
        """Of those that run."""
        return [self._dag.share(launch) for launch in self.left_us]

    def begin(self, launch: int, extra_us: float = 0.0) -> None:
        """Start one now; `extra_us` is what it waits before it works."""
        self.left_us[launch] = self._dag.times_us[launch] + extra_us

    def advance(self) -> list[int]:
        """Let time pass until at least one ends; those that have, in order."""
        rate = self._model.rate(self.shares())
        step = min(self.left_us.values()) / rate
        self.now_us += step
        self.left_us = {launch: left - step * rate for launch, left in self.left_us.items()}
        ended = sorted(launch for launch, left in self.left_us.items() if left <= _EPSILON_US)
        for launch in ended:
            del self.left_us[launch]
        return ended


def simulate(
    dag: Dag, order: Sequence[tuple[int, int, Sequence[int]]], model: ContentionModel, event_us: float
) -> float:
    """How long a schedule takes under a model: each stream runs its launches in order, each when its waits have ended.

    Args:
        dag: times and shares.
        order: (launch, stream, positions waited for), in the order of launching.
        model: how launches slow one another.
        event_us: what a wait for another stream costs.
    """
    queues: dict[int, list[int]] = {}
    for at, (_, stream, _) in enumerate(order):
        queues.setdefault(stream, []).append(at)
    position = {launch: at for at, (launch, _, _) in enumerate(order)}
    ended: dict[int, float] = {}
    running = RunningLaunches(dag, model)
    busy: set[int] = set()
    while len(ended) < len(order):
        for stream, queue in queues.items():
            if stream in busy or not queue:
                continue
            launch, _, waits = order[queue[0]]
            if all(before in ended for before in waits):
                queue.pop(0)
                busy.add(stream)
                late = any(ended[before] == running.now_us for before in waits)  # others were heard of long ago
                running.begin(launch, event_us if late else 0.0)
        for launch in running.advance():
            ended[position[launch]] = running.now_us
            busy.discard(order[position[launch]][1])
    return running.now_us


CAPACITIES = tuple(1 + step / 8 for step in range(-4, 17))
"""Capacities tried when one is fitted: from half a device to three."""


def fit_capacity(
    dag: Dag, measured: Sequence[tuple[Sequence[tuple[int, int, Sequence[int]]], float]], event_us: float
) -> float:
    """The capacity under which schedules take what the device's clock said, as nearly as the model can.

    Args:
        dag: times and shares.
        measured: schedules, as `simulate` takes them, and their times, microseconds.
        event_us: what a wait for another stream costs.

    Returns:
        The capacity of the least relative error; of equals the one nearest to 1, which is the book's.
    """

    def off(capacity: float) -> tuple[float, float]:
        model = CapacityModel(capacity)
        errors = [(simulate(dag, order, model, event_us) / took - 1) ** 2 for order, took in measured if took > 0]
        return round(sum(errors), 9), abs(capacity - 1)

    return min(CAPACITIES, key=off)
