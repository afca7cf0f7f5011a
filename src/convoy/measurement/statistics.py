"""Statistics of timings: median, spread, disturbed rounds, and when one is faster. Plain Python, no torch."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

DISTURBED: Final = 1.25
"""A round in which the candidates together ran this much slower than usual was throttled or disturbed. It is well over the 15
% by which interleaved timings differ on a busy machine, and well under the factor of 2 of a shared core."""

MIN_KEPT: Final = 0.5
"""Least share of rounds that is kept: if most are disturbed, that is the machine's normal state."""

Name = TypeVar("Name")
"""What a candidate is named by."""


@dataclass(frozen=True, slots=True)
class SampleSummary:
    """Samples, summarised.

    Attributes:
        samples: how many count.
        median_us: their median, microseconds.
        spread_us: half the distance between their 20th and 80th percentiles, microseconds.
    """

    samples: int
    median_us: float
    spread_us: float


def summarise(samples: Sequence[float]) -> SampleSummary:
    """Median and spread of at least one sample in microseconds; one sample has no spread."""
    if len(samples) == 1:
        return SampleSummary(1, samples[0], 0.0)
    cuts = statistics.quantiles(samples, n=10, method="inclusive")
    return SampleSummary(len(samples), statistics.median(samples), (cuts[7] - cuts[1]) / 2)


def is_faster(challenger: SampleSummary, champion: SampleSummary) -> bool:
    """Whether the challenger beats the champion by more than the larger of the two spreads."""
    return challenger.median_us + max(challenger.spread_us, champion.spread_us) < champion.median_us


def disturbed_rounds(samples: Mapping[Name, Sequence[float]]) -> frozenset[int]:
    """Indices of rounds to drop: those in which the interleaved candidates together were slow.

    Each candidate's sample is divided by that candidate's median; a round's factor is the median of these over the
    candidates, so one noisy candidate among many does not cause a round to be dropped. At most half of the rounds are
    dropped, the slowest first.

    Args:
        samples: by candidate, one sample per round, all of one length.
    """
    series = [list(values) for values in samples.values()]
    if not series or len(series[0]) < 3:
        return frozenset()
    medians = [statistics.median(values) for values in series]
    rounds = len(series[0])
    factors = [
        statistics.median(
            values[index] / median if median else 1.0 for values, median in zip(series, medians, strict=True)
        )
        for index in range(rounds)
    ]
    slow = sorted((i for i in range(rounds) if factors[i] > DISTURBED), key=lambda i: -factors[i])
    return frozenset(slow[: int(rounds * (1 - MIN_KEPT))])


def summarise_rounds(samples: Mapping[Name, Sequence[float]]) -> dict[Name, SampleSummary]:
    """Summarise interleaved samples by candidate, without the disturbed rounds."""
    dropped = disturbed_rounds(samples)
    return {
        name: summarise([value for index, value in enumerate(values) if index not in dropped])
        for name, values in samples.items()
    }
