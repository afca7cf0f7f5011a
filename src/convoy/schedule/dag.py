"""The dependencies of launches, with their times; the critical path and its bounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from convoy.schedule.memory import LaunchValues


@dataclass(frozen=True, slots=True)
class Dag:
    """Launches by index, in an order in which each follows those that it needs.

    Attributes:
        times_us: time of each launch.
        needs: for each launch, the launches whose results it reads, ascending.
        shares: share of the device that each launch takes, 0..1; empty if unknown.
        lanes: launches that must run on one stream, by index: on a shared stream, or on a reserved one beyond those, such as
            a network's.
    """

    times_us: tuple[float, ...]
    needs: tuple[tuple[int, ...], ...]
    shares: tuple[float, ...] = ()
    lanes: Mapping[int, int] = field(default_factory=dict[int, int])

    def share(self, launch: int) -> float:
        """Share of the device that a launch takes; 1 if unknown."""
        return self.shares[launch] if self.shares else 1.0

    @property
    def total_us(self) -> float:
        """Time on one stream."""
        return sum(self.times_us)

    def followers(self) -> list[list[int]]:
        """For each launch, those that need it, ascending."""
        found: list[list[int]] = [[] for _ in self.needs]
        for index, needs in enumerate(self.needs):
            for before in needs:
                found[before].append(index)
        return found

    def distances_us(self) -> list[float]:
        """For each launch, the longest path from its start to the end of everything that depends on it."""
        found = list(self.times_us)
        for index in reversed(range(len(found))):
            for before in self.needs[index]:
                found[before] = max(found[before], self.times_us[before] + found[index])
        return found

    def critical_path(self) -> list[int]:
        """The launches on the longest path, first to last; the earliest of equals."""
        distances = self.distances_us()
        followers = self.followers()
        at = max((i for i, needs in enumerate(self.needs) if not needs), key=lambda i: distances[i], default=-1)
        path: list[int] = []
        while at >= 0:
            path.append(at)
            at = max(followers[at], key=lambda i: distances[i], default=-1)
        return path

    @property
    def device_us(self) -> float:
        """Time of all the work on a fully used device: no schedule can be shorter, if shares add up."""
        return sum(time * self.share(launch) for launch, time in enumerate(self.times_us))

    @property
    def bound_us(self) -> float:
        """The larger of both bounds."""
        return max(self.critical_us, self.device_us if self.shares else 0.0)

    @property
    def critical_us(self) -> float:
        """Time of the critical path: no schedule can be shorter, with any number of streams."""
        return max(self.distances_us(), default=0.0)


def dag_of(launches: Sequence[LaunchValues], times_us: Sequence[float], shares: Sequence[float] = ()) -> Dag:
    """The dependencies of launches that read and make named values; a value is made before it is read.

    Args:
        launches: in an order that is valid on one stream.
        times_us: their times.
        shares: shares of the device that they take, if known.
    """
    made: dict[str, int] = {}
    needs: list[tuple[int, ...]] = []
    for index, launch in enumerate(launches):
        needs.append(tuple(sorted({made[name] for name in launch.args if name in made})))
        made.update(dict.fromkeys(launch.results, index))
    return Dag(tuple(times_us), tuple(needs), tuple(shares))
