"""Jobs of data-parallel training on the GPUs of a host, in order: each on GPUs that no other one uses, until the time ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass

from convoy.compare.runs.rows import Row
from convoy.compare.scaling import scaling_launch
from convoy.compare.scaling.scaling_jobs import ScalingJob

LEAST_S = 25.0
"""A job is not begun when less time is left: NCCL and the rounds alone take as long."""


class Clock:
    """The time of the whole call: seconds left of `seconds`."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        """Seconds left."""
        return self._end - time.monotonic()


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """A job's place among those that wait or run: the GPUs that it needs."""

    devices: frozenset[str]


class Places:
    """Which jobs wait or run, in order. A job may run when no earlier one needs one of its GPUs."""

    def __init__(self) -> None:
        self._places: list[Place] = []
        self._changed = threading.Condition()

    def enter(self, devices: Sequence[str]) -> Place:
        """The last place."""
        place = Place(frozenset(devices))
        with self._changed:
            self._places.append(place)
        return place

    def leave(self, place: Place) -> None:
        """Give the place up, and its GPUs with it."""
        with self._changed:
            self._places.remove(place)
            self._changed.notify_all()

    def await_turn(self, place: Place) -> None:
        """Return when no earlier place needs one of this one's GPUs."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_behind(place))

    def _is_behind(self, place: Place) -> bool:
        before = self._places[: self._places.index(place)]
        return any(place.devices & other.devices for other in before)


@dataclass(frozen=True, slots=True)
class JobQueue:
    """The places of all jobs, and the time of the call."""

    places: Places
    clock: Clock

    def run(self, job: ScalingJob, place: Place, visible: Sequence[str]) -> Row | None:
        """Run a job at its place; None where too little time was left, or where the call's end cut it off."""
        cut = False

        @contextmanager
        def turn() -> Iterator[float]:
            nonlocal cut
            self.places.await_turn(place)
            left_s = self.clock.left_s
            cut = left_s < job.request.timeout_s
            yield min(left_s, job.request.timeout_s) if left_s > LEAST_S else 0.0

        try:
            row = scaling_launch.run(job, devices=visible, turn=turn)
        finally:
            self.places.leave(place)
        return None if row is not None and cut and row.status == "timeout" else row


def run_jobs(
    jobs: Sequence[ScalingJob], devices: Sequence[str], clock: Clock, take: Callable[[Row], None], *, beside: bool
) -> None:
    """Run jobs; those that the time does not suffice for are not begun, or dropped.

    While jobs run, the processes of the next one start and import modules.

    Args:
        jobs: the most important first.
        devices: GPUs, as `CUDA_VISIBLE_DEVICES` names them.
        clock: of the whole call.
        take: is given each row.
        beside: whether jobs run beside each other.
    """
    queue, running, first = JobQueue(Places(), clock), set[Future[Row | None]](), 0

    def collect(most: int) -> None:
        while len(running) > most:
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                running.remove(done)
                row = done.result()
                if row is not None:
                    take(row)

    with ThreadPoolExecutor(len(devices) + 1) as pool:
        for job in jobs:
            own = [devices[(first + index) % len(devices)] for index in range(job.processes)]
            first = (first + job.processes) % len(devices)
            collect(len(devices) // job.processes if beside else 1)
            place = queue.places.enter(own if beside else devices)
            running.add(pool.submit(queue.run, job, place, own if job.request.device == "cuda" else ()))
        collect(0)
