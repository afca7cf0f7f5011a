"""Protocol: how one sample is taken. Its id stands in every row, and rows of different protocols are not compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from convoy.errors import InputError
from convoy.settings import Effort

CLOCKS: Final = ("wall", "events", "graph")
"""`wall`: perf_counter_ns round launches on a CPU. `events`: CUDA events round launches. `graph`: CUDA events round the
replay of a captured graph of launches, which is how the finished program runs them."""

VERSIONS: Final = {"wall": (5, 4), "events": (4,), "graph": (5, 4)}
"""By clock, the version in an id, the present one first. Of `graph`, 4 chose a graph's launches by the host's clock: candidates
that take the host long had fewer, and up to some microseconds of the graph's start in their times. Of `wall`, 4 found
constants in the cache that an engine takes as torch has them, such as the weight of a linear layer."""

MAX_COPIES: Final = 8
"""Copies of a candidate's packed constants that cold timing goes round, at most: with 8, all constants of an eighth of the
cache and more come from memory; smaller ones take little time to fetch, and packing many copies takes much."""


@dataclass(frozen=True, slots=True)
class Protocol:
    """How a candidate is timed.

    What makes two samples comparable stands in `id`: the clock, the state of the cache, the least length of a sample. How
    many samples were taken stands in the row instead, so that a search of more effort starts from what a quick one found.

    Attributes:
        clock: one of `CLOCKS`.
        cold: whether every launch finds its constants in memory and not in the last-level cache, as in a net whose weights
            do not fit there; arguments are as warm as the launch before left them.
        min_sample_us: launches are repeated until a sample is about this long; the sample is their mean.
        few: samples for a first look at many candidates.
        rounds: samples for the few that may win.
        prune_ratio: a candidate whose first run takes more than this many times the best known is not timed again.
    """

    clock: str
    cold: bool = True
    min_sample_us: int = 1000
    few: int = 3
    rounds: int = 9
    prune_ratio: float = 3.0

    def __post_init__(self) -> None:
        if self.clock not in CLOCKS:
            raise InputError("clock", self.clock, "one of " + ", ".join(CLOCKS))
        for name in ("min_sample_us", "few", "rounds"):
            if getattr(self, name) < 1:
                raise InputError(name, getattr(self, name), "an integer of at least 1")
        if not self.prune_ratio > 1:
            raise InputError("prune_ratio", self.prune_ratio, "a number above 1")

    @property
    def id(self) -> str:
        """Canonical text; a clock's version is counted up whenever the timer's meaning changes."""
        return self._id(VERSIONS[self.clock][0])

    @property
    def earlier(self) -> tuple[str, ...]:
        """Ids of earlier versions. Their rows are not compared with this one's, but say what is worth measuring."""
        return tuple(map(self._id, VERSIONS[self.clock][1:]))

    def _id(self, version: int) -> str:
        return f"v{version}:{self.clock}:{'cold' if self.cold else 'warm'}:{self.min_sample_us}us"

    @property
    def copies_whole(self) -> bool:
        """Whether cold timing copies also those constants that an engine takes as torch has them, and not packed ones alone.

        By a GPU's clocks it does not: weights of 1x1 convolutions and linear layers are in the cache for engines that do not pack
        tiles. Copying them would be another version, with which no row that ships could be compared.
        """
        return self.clock == "wall"

    def is_thorough(self, samples: int) -> bool:
        """Whether so many samples are what `rounds` asks for; up to half of the rounds may have been dropped as disturbed."""
        return 2 * samples >= self.rounds


def protocol_for(effort: Effort | str, device: str) -> Protocol:
    """The protocol that a search of this effort uses on a device.

    All efforts have one id on one device, so that rows carry over. A CPU's sample lasts 500 µs: a hundred times what the clock
    and a launch through PyTorch cost (about 5 µs), and short enough for a net's hundreds of candidates. A GPU's lasts 200 µs:
    four hundred times the resolution of its events (0.5 µs; CUDA Runtime API, cudaEventElapsedTime).
    """
    thorough = Effort(effort) is Effort.FULL
    if device == "cuda":
        return Protocol("graph", min_sample_us=200, few=3, rounds=31 if thorough else 11)
    if device == "cpu":
        return Protocol("wall", min_sample_us=500, few=3, rounds=21 if thorough else 9)
    raise InputError("device", device, "cpu or cuda")
