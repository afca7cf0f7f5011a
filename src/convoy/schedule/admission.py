"""List scheduling with admission: a launch begins beside others only while the device has free resources.

The launch with the longest path behind it is admitted at once, so the critical path never waits. Any other launch that does
not fit is held back until a running launch has ended, and waits for that end on the device too, by an event. Without the
event the device would begin it as soon as its stream is free, and it would take blocks from the critical path.
"""

from __future__ import annotations

from collections.abc import Sequence

from convoy.schedule.contention import ContentionModel, RunningLaunches
from convoy.schedule.dag import Dag

Starts = dict[int, tuple[float, int]]
"""Start, microseconds, and stream of each launch."""

HeldBack = dict[int, tuple[int, ...]]
"""For launches that were held back, the launches whose end admitted them."""


def admit(
    dag: Dag, streams: int, priorities: Sequence[float], model: ContentionModel, event_us: float, *, holds: bool = True
) -> tuple[float, Starts, HeldBack]:
    """Place launches in simulated time, from event to event.

    Args:
        dag: the dependencies, with shares.
        streams: streams for launches without a lane beyond these.
        priorities: priority of each launch; higher goes first.
        model: how launches slow each other, and what fits.
        event_us: cost of waiting for another stream.
        holds: whether to hold back launches that do not fit; else all begin as soon as a stream is free, and slow each other.

    Returns:
        The end of the last launch; start and stream of each; and what the held-back launches waited for.
    """
    return _Admission(dag, streams, priorities, model, event_us, holds=holds).run()


class _Admission:
    def __init__(
        self,
        dag: Dag,
        streams: int,
        priorities: Sequence[float],
        model: ContentionModel,
        event_us: float,
        *,
        holds: bool,
    ) -> None:
        self._hold = holds
        self._dag, self._priorities, self._model, self._event_us = dag, priorities, model, event_us
        self._distances = dag.distances_us()
        self._followers = dag.followers()
        self._missing = [len(needs) for needs in dag.needs]
        self._ready = {launch for launch, count in enumerate(self._missing) if not count}
        self._last: dict[int, int] = dict.fromkeys(range(streams), -1)
        self._free = set(range(streams))
        self._lanes = {lane for lane in dag.lanes.values() if lane >= streams}
        self._free |= self._lanes
        self._last.update(dict.fromkeys(self._lanes, -1))
        self._running = RunningLaunches(dag, model)
        self._waiting: set[int] = set()
        self._ended: list[int] = []
        self._begun: Starts = {}
        self._holds: HeldBack = {}

    def run(self) -> tuple[float, Starts, HeldBack]:
        while self._ready or self._running.left_us:
            for launch in sorted(self._ready, key=lambda one: (-self._priorities[one], one)):
                self._consider(launch)
            self._ended = self._running.advance()
            for launch in self._ended:
                self._free.add(self._begun[launch][1])
                for follower in self._followers[launch]:
                    self._missing[follower] -= 1
                    if not self._missing[follower]:
                        self._ready.add(follower)
        return self._running.now_us, self._begun, self._holds

    def _consider(self, launch: int) -> None:
        """Begin a ready launch if a stream is free and it fits; note if it does not fit."""
        stream = self._stream(launch)
        if stream is None:
            return
        if not self._may_begin(launch):
            self._waiting.add(launch)
            return
        held = launch in self._waiting
        if held:
            self._holds[launch] = tuple(end for end in self._ended if not self._is_apart(end))
        crosses = any(self._begun[before][1] != stream for before in self._newest(launch, held=held))
        self._ready.discard(launch)
        self._free.discard(stream)
        self._last[stream] = launch
        self._begun[launch] = (self._running.now_us, stream)
        self._running.begin(launch, self._event_us if crosses else 0.0)

    def _newest(self, launch: int, *, held: bool) -> list[int]:
        """The launches that ended just now and that it waits for: only they can still cost an event."""
        waits = {*self._dag.needs[launch], *(self._ended if held else ())}
        return [before for before in self._ended if before in waits]

    def _stream(self, launch: int) -> int | None:
        """A free stream: its lane, or one whose last launch it needs or that ended just now, or the lowest."""
        lane = self._dag.lanes.get(launch)
        if lane is not None:
            return lane if lane in self._free else None
        free = self._free - self._lanes
        needs = self._dag.needs[launch]
        return min(free, key=lambda s: (self._last[s] not in needs, self._last[s] not in self._ended, s), default=None)

    def _is_apart(self, launch: int) -> bool:
        """Whether it runs on a reserved stream, such as a network's."""
        return self._dag.lanes.get(launch, -1) in self._lanes

    def _may_begin(self, launch: int) -> bool:
        if not self._hold or self._is_apart(launch):
            return True
        if self._model.fits(self._running.shares(), self._dag.share(launch)):
            return True
        return self._distances[launch] >= max(
            left + self._distances[other] - self._dag.times_us[other] for other, left in self._running.left_us.items()
        )
