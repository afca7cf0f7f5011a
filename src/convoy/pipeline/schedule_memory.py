"""Schedules that hold no more memory than is allowed: what fills a side stream at its fullest stays on the first stream."""

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
    """Puts steps on streams."""

    def __call__(self, *, home: Collection[int], tries: int) -> tuple[Step, ...]:
        """A schedule in which these steps, by index, stay on the first stream; the best of so many orders."""
        ...


@dataclass(frozen=True, slots=True)
class FittedSchedule:
    """A schedule that holds what is allowed.

    Attributes:
        steps: the schedule.
        wanted_bytes: what it would hold if nothing had to stay on the first stream.
        home: steps that stay there for it.
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
    """A schedule that holds no more than so many bytes; None where none is found.

    Memory that a stream gives back serves that stream alone, so what side streams hold at their fullest adds up, though it
    may be in different layers. On the first stream the same work uses the same memory in turn. So the steps whose values lie in
    the fullest side stream then go to the first one, and all are spread anew, until it is enough.

    Args:
        spread: makes schedules.
        steps: on one stream; `spread` counts in them.
        bound_of: a schedule, bound.
        bytes_of: what it holds.
        most_bytes: what it may hold.
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
