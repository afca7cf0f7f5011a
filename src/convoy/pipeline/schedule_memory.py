"""Schedules within a memory limit: steps whose values fill a side stream's memory stay on the first stream."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from convoy.plan import Step
from convoy.program.bound_plan import BoundPlan
from convoy.program.lifetimes import stream_pools
from convoy.schedule import MAX_ORDERS

ROUNDS: Final = 16
"""Schedules looked at for one number of streams: of InceptionV3 and DenseNet-121, for inference and training, all came within
1.1 times the serial schedule's memory in 13 at most, for one to six hundredths of the time that streams are predicted to take."""

ORDERS: Final = 8
"""Orders tried for each after the first: a step of DenseNet-121 takes a second of the host for so many."""


class ScheduleMaker(Protocol):
    """Assigns steps to streams."""

    def __call__(self, *, home: Collection[int], tries: int) -> tuple[Step, ...]:
        """A schedule in which the steps with these indices stay on the first stream; the best of `tries` orders."""
        ...


@dataclass(frozen=True, slots=True)
class FittedSchedule:
    """A schedule within the memory limit.

    Attributes:
        steps: the schedule.
        wanted_bytes: memory of the schedule without steps that must stay on the first stream.
        home: number of steps that stay on the first stream.
    """

    steps: tuple[Step, ...]
    wanted_bytes: int
    home: int


def fit_in_memory(
    spread: ScheduleMaker,
    steps: Sequence[Step],
    bound_of: Callable[[Sequence[Step]], BoundPlan],
    bytes_of: Callable[[BoundPlan], int],
    most_bytes: float,
) -> FittedSchedule | None:
    """A schedule that holds at most `most_bytes`; None if none is found.

    Memory freed on a stream serves that stream only, so the peaks of the side streams add up, also if they occur in different
    layers. On the first stream the same work reuses memory. So the steps whose values make the largest side stream's peak move to
    the first stream, and a new schedule is made, until the limit is kept.

    Args:
        spread: makes schedules.
        steps: steps on one stream, to which the indices of `spread` refer.
        bound_of: binds a schedule.
        bytes_of: memory of a bound schedule.
        most_bytes: the limit.
    """
    index = {step.results: at for at, step in enumerate(steps)}
    home: set[int] = set()
    wanted = 0
    for _ in range(ROUNDS):
        placed = spread(home=home, tries=ORDERS if home else MAX_ORDERS)
        bound = bound_of(placed)
        held = bytes_of(bound)
        wanted = wanted or held
        if held <= most_bytes:
            return FittedSchedule(placed, wanted, len(home))
        side = {stream: pool for stream, pool in stream_pools(bound).items() if stream}
        fullest = sorted(side, key=lambda stream: -side[stream].size_bytes)
        makers = ({index[placed[at].results] for at in side[stream].makers} - home for stream in fullest)
        moved = next(filter(None, makers), set[int]())
        if not moved:
            return None
        home |= moved
    return None
