"""How one sample is taken. The protocol's id is stored in every row; rows of different protocols are not compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from convoy.errors import InputError
from convoy.settings import Effort

CLOCKS: Final = ("wall", "events", "graph")
"""`wall`: perf_counter_ns around launches on a CPU. `events`: CUDA events around launches. `graph`: CUDA events around the
replay of a captured graph of launches, as the finished program runs them."""

VERSIONS: Final = {"wall": (5, 4), "events": (4,), "graph": (5, 4)}
"""By clock, the version in an id, the present one first. Version 4 of `graph` chose the number of launches in a graph by the
host's clock: candidates with slow host code had fewer, so up to some microseconds of the graph's start were in their
times. Version 4 of `wall` left constants in the cache that an engine uses unpacked, such as the weight of a linear layer."""

MAX_COPIES: Final = 8
"""Most copies of a candidate's packed constants that cold timing uses in turn. With 8, constants of at least an eighth of the
cache come from memory; smaller ones take little time to load, and packing many copies takes long."""


@dataclass(frozen=True, slots=True)
class Protocol:
    """How a candidate is timed.

    The `id` holds what makes two samples comparable: the clock, the state of the cache, the least length of a sample. The
    number of samples is stored in the row instead, so that a longer search continues from a quick one.

    Attributes:
        clock: one of `CLOCKS`.
        cold: whether every launch finds its constants in memory instead of the last-level cache, as in a net whose weights
            exceed the cache; arguments are as warm as the previous launch left them.
        min_sample_us: launches are repeated until a sample takes about this long; the sample is their mean.
        few: samples for a first look at many candidates.
        rounds: samples for the few candidates that may win.
        prune_ratio: a candidate whose first run takes more than this many times the best known time is not timed again.
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
        """Canonical text; a clock's version increases when the timer's meaning changes."""
        return self._id(VERSIONS[self.clock][0])

    @property
    def earlier(self) -> tuple[str, ...]:
        """Ids of earlier versions. Their rows are not compared with this protocol's, but give hints about what to measure."""
        return tuple(map(self._id, VERSIONS[self.clock][1:]))

    def _id(self, version: int) -> str:
        return f"v{version}:{self.clock}:{'cold' if self.cold else 'warm'}:{self.min_sample_us}us"

    @property
    def copies_whole(self) -> bool:
        """Whether cold timing also copies constants that an engine uses unpacked.

        On a GPU it does not: weights of 1x1 convolutions and linear layers stay in the cache for engines that do not pack
        tiles. Copying them would be a new version, with which no shipped row could be compared.
        """
        return self.clock == "wall"

    def is_thorough(self, samples: int) -> bool:
        """Whether this many samples are all that `rounds` asks for.

        Up to half of the rounds may have been dropped as disturbed.
        """
        return 2 * samples >= self.rounds


def protocol_for(effort: Effort | str, device: str) -> Protocol:
    """The protocol that a search of this effort uses on a device.

    All efforts have the same id on one device, so rows are shared. A CPU's sample lasts 500 µs: a hundred times the cost of
    the clock and of a launch through PyTorch (about 5 µs), and short enough for a net's hundreds of candidates. A GPU's lasts
    200 µs: four hundred times the resolution of its events (0.5 µs; CUDA Runtime API, cudaEventElapsedTime).
    """
    thorough = Effort(effort) is Effort.FULL
    if device == "cuda":
        return Protocol("graph", min_sample_us=200, few=3, rounds=31 if thorough else 11)
    if device == "cpu":
        return Protocol("wall", min_sample_us=500, few=3, rounds=21 if thorough else 9)
    raise InputError("device", device, "cpu or cuda")
