"""A model of how concurrent launches slow each other, and the time of a given schedule under it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from convoy.schedule.dag import Dag

_EPSILON_US = 1e-9
"""Microseconds of remaining work below which a launch has ended, because of rounding."""


class ContentionModel(Protocol):
    """How fast launches run beside each other."""

    def rate(self, shares: Sequence[float]) -> float:
        """Speed of each of the concurrent launches; 1 is the speed of a launch alone.

        Args:
            shares: the share of the device that each takes, 0..1.
        """
        ...

    def fits(self, shares: Sequence[float], share: float) -> bool:
        """Whether another launch may begin beside the running ones."""
        ...


@dataclass(frozen=True, slots=True)
class CapacityModel:
    """Launches that fit on the device together do not slow each other; otherwise all are slowed alike, and no work is lost.

    Attributes:
        capacity: sum of shares from which launches slow each other. Nominally 1; more if kernels do not use all resources
            that they hold (latency, memory), less if they share others (L2, bandwidth). It is fitted to measured schedules.
    """

    capacity: float = 1.0

    def rate(self, shares: Sequence[float]) -> float:
        """1 while the shares fit; then the capacity over the sum of shares."""
        wanted = sum(shares)
        return 1.0 if wanted <= self.capacity else self.capacity / wanted

    def fits(self, shares: Sequence[float], share: float) -> bool:
        """Whether all of them fit; a launch alone always fits."""
        return not shares or sum(shares) + share <= self.capacity


class RunningLaunches:
    """The running launches, and how much of each is left.

    Args:
        dag: their times and shares.
        model: how they slow each other.
    """

    def __init__(self, dag: Dag, model: ContentionModel) -> None:
        self._dag, self._model = dag, model
        self.left_us: dict[int, float] = {}
        self.now_us = 0.0

    def shares(self) -> list[float]:
        """Shares of the running launches."""
        return [self._dag.share(launch) for launch in self.left_us]

    def begin(self, launch: int, extra_us: float = 0.0) -> None:
        """Start a launch now; `extra_us` is the time that it waits before it works."""
        self.left_us[launch] = self._dag.times_us[launch] + extra_us

    def advance(self) -> list[int]:
        """Advance the time until at least one launch ends; returns the ended ones, in order."""
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
    """The time of a schedule under a model: each stream runs its launches in order, each after its waits.

    Args:
        dag: times and shares.
        order: (launch, stream, positions waited for), in launch order.
        model: how launches slow each other.
        event_us: cost of a wait for another stream.
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
                late = any(ended[before] == running.now_us for before in waits)  # the other waits ended earlier
                running.begin(launch, event_us if late else 0.0)
        for launch in running.advance():
            ended[position[launch]] = running.now_us
            busy.discard(order[position[launch]][1])
    return running.now_us


CAPACITIES = tuple(1 + step / 8 for step in range(-4, 17))
"""Capacities that `fit_capacity` tries: from half a device to three."""


def fit_capacity(
    dag: Dag, measured: Sequence[tuple[Sequence[tuple[int, int, Sequence[int]]], float]], event_us: float
) -> float:
    """The capacity with which the model reproduces measured schedules best.

    Args:
        dag: times and shares.
        measured: schedules, as `simulate` takes them, and their times, microseconds.
        event_us: cost of a wait for another stream.

    Returns:
        The capacity with the least relative error; of equals the one nearest to 1.
    """

    def off(capacity: float) -> tuple[float, float]:
        model = CapacityModel(capacity)
        errors = [(simulate(dag, order, model, event_us) / took - 1) ** 2 for order, took in measured if took > 0]
        return round(sum(errors), 9), abs(capacity - 1)

    return min(CAPACITIES, key=off)
