"""Jobs of data-parallel training on the GPUs of a host, in order: each on GPUs that no other one uses, until the time ends."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass

from convoy.compare.runs.rows import Row
from convoy.compare.scaling import scaling_launch
from convoy.compare.scaling.scaling_jobs import ScalingJob, parts_of

LEAST_S = 25.0
"""A job is not begun when less time is left: NCCL and the rounds alone take as long."""

POLL_S = 0.1
"""How often a group looks whether a job has prepared."""


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


class PreparedGroup:
    """Jobs that prepare beside each other. None of them is timed before all have prepared, have ended, or have taken too long."""

    def __init__(self, count: int) -> None:
        self._left = count
        self._changed = threading.Condition()

    def await_own(self, prepared: Callable[[], bool], limit_s: float) -> bool:
        """Wait until one job has prepared, or has ended; false where it has not after so many seconds."""
        end = time.monotonic() + limit_s
        while not prepared():
            if time.monotonic() > end:
                return False
            time.sleep(POLL_S)
        return True

    def leave(self) -> None:
        """A job prepares no longer."""
        with self._changed:
            self._left -= 1
            self._changed.notify_all()

    def await_others(self) -> None:
        """Wait until no job prepares."""
        with self._changed:
            self._changed.wait_for(lambda: self._left == 0)


@dataclass(frozen=True, slots=True)
class JobQueue:
    """The places of all jobs, and the time of the call."""

    places: Places
    clock: Clock

    def run(
        self, job: ScalingJob, place: Place, visible: Sequence[str], group: PreparedGroup | None = None
    ) -> Row | None:
        """Run a job at its place; None where too little time was left, or where the call's end cut it off.

        Args:
            job: to run.
            place: its own.
            visible: the GPUs that it may use.
            group: the jobs that prepare beside it: none is timed before all have prepared.
        """
        cut = late = False
        leave = once(group.leave) if group is not None else None

        @contextmanager
        def turn(prepared: Callable[[], bool]) -> Iterator[float]:
            nonlocal cut, late
            if group is not None and leave is not None:
                limit_s = min(self.clock.left_s, job.request.timeout_s)
                late = not group.await_own(prepared, limit_s)
                cut = late and limit_s < job.request.timeout_s
                if late:
                    yield 0.0
                    return
                leave()
                group.await_others()
            self.places.await_turn(place)
            left_s = self.clock.left_s
            cut = left_s < job.request.timeout_s
            yield min(left_s, job.request.timeout_s) if left_s > LEAST_S else 0.0

        try:
            row = scaling_launch.run(job, devices=visible, turn=turn, prepare_first=group is not None)
        finally:
            self.places.leave(place)
            if leave is not None:
                leave()
        if late and not cut:
            return job.row(status="timeout", reason=f"not prepared after {job.request.timeout_s:g} s")
        return None if row is not None and cut and row.status == "timeout" else row


def once(call: Callable[[], None]) -> Callable[[], None]:
    """A function that calls another the first time."""
    todo = [call]

    def called() -> None:
        if todo:
            todo.pop()()

    return called


def run_jobs(
    jobs: Sequence[ScalingJob],
    devices: Sequence[str],
    clock: Clock,
    take: Callable[[Row], None],
    *,
    beside: bool,
    together: int = 1,
) -> None:
    """Run jobs; those that the time does not suffice for are not begun, or dropped.

    While jobs run, the processes of the next one start and import modules. With `together` above 1, jobs prepare in groups, each
    GPU for as many jobs at once, and are timed when the whole group has prepared, each alone on its GPUs.

    Args:
        jobs: the most important first.
        devices: GPUs, as `CUDA_VISIBLE_DEVICES` names them.
        clock: of the whole call.
        take: is given each row.
        beside: whether jobs run beside each other, on other GPUs.
        together: most jobs that prepare on one GPU at once.
    """
    queue, running = JobQueue(Places(), clock), set[Future[Row | None]]()

    def collect(most: int) -> None:
        while len(running) > most:
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                running.remove(done)
                row = done.result()
                if row is not None:
                    take(row)

    def start(job: ScalingJob, own: Sequence[str], group: PreparedGroup | None) -> None:
        place = queue.places.enter(own if beside else devices)
        running.add(pool.submit(queue.run, job, place, own if job.request.device == "cuda" else (), group))

    placed = list(_on_gpus(jobs, devices))
    with ThreadPoolExecutor(len(devices) * together + 1) as pool:
        if together > 1:
            for members in _groups(placed, together):
                group = PreparedGroup(len(members))
                for job, own in members if clock.left_s > LEAST_S else ():
                    start(job, own, group)
                collect(0)
        else:
            for job, own in placed:
                collect(len(devices) // job.processes if beside else 1)
                start(job, own, None)
            collect(0)


def _on_gpus(jobs: Sequence[ScalingJob], devices: Sequence[str]) -> Iterator[tuple[ScalingJob, list[str]]]:
    """Each job with its GPUs, all of which take turns."""
    first = 0
    for job in jobs:
        yield job, [devices[(first + index) % len(devices)] for index in range(job.processes)]
        first = (first + job.processes) % len(devices)


def _groups(
    placed: Sequence[tuple[ScalingJob, list[str]]], together: int
) -> Iterator[list[tuple[ScalingJob, list[str]]]]:
    """Jobs in order, in groups whose jobs all have as many processes, and of which no GPU has more than `together`.

    Convoy's jobs of one process make the plans for all others, by peaks that they measure: each is alone on its GPU.
    """
    group: list[tuple[ScalingJob, list[str]]] = []
    used = Counter[str]()
    for job, own in placed:
        most = 1 if _makes_plan(job) else together
        if group and (_kind(group[-1][0]) != _kind(job) or any(used[name] >= most for name in own)):
            yield group
            group, used = [], Counter()
        group.append((job, own))
        used.update(own)
    if group:
        yield group


def _makes_plan(job: ScalingJob) -> bool:
    return job.processes == 1 and parts_of(job.provider)[0] == "convoy"


def _kind(job: ScalingJob) -> tuple[int, bool]:
    return job.processes, _makes_plan(job)
