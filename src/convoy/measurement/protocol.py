"""Protocol: how a candidate is timed. Its id stands in every row, and rows of different protocols are not compared."""

from __future__ import annotations

from dataclasses import dataclass

from convoy.settings import Effort


@dataclass(frozen=True, slots=True)
class Protocol:
    """How to time.

    Attributes:
        id: name and version of the rules below; counted up when they change.
        rounds: interleaved rounds of the finalists.
        screen_rounds: rounds of the first look at every candidate.
        least_us: a timed sample repeats a launch until it has run this long.
        cold: rotate over copies of the tensors that exceed the last-level cache, so that weights come from memory.
        prune: a candidate whose first run takes this many times the best so far is not timed further.
    """

    id: str
    rounds: int
    screen_rounds: int
    least_us: float
    cold: bool
    prune: float = 3.0


_CPU = Protocol("cpu-2", rounds=9, screen_rounds=3, least_us=200.0, cold=False)
_CUDA = Protocol("cuda-2", rounds=11, screen_rounds=3, least_us=200.0, cold=True)


def protocol_for(effort: Effort, device: str) -> Protocol:
    """The protocol of a device. All efforts share it, so that what `quick` measured serves `full` too."""
    del effort
    return _CUDA if device == "cuda" else _CPU
