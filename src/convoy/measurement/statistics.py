"""Medians, spreads, and when one time counts as less than another."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

THROTTLED = 1.5
"""A round whose mean over candidates is this many times the median round's is dropped: something else used the machine."""


def median_and_spread(samples: Sequence[float]) -> tuple[float, float]:
    """Median, and half the distance between the 20th and the 80th percentile (0 for a single sample)."""
    if len(samples) < 2:
        return samples[0], 0.0
    cuts = statistics.quantiles(samples, n=10, method="inclusive")
    return statistics.median(samples), (cuts[7] - cuts[1]) / 2


def steady_rounds(rounds: Sequence[Sequence[float]]) -> list[Sequence[float]]:
    """The rounds that were not disturbed. A round holds one time for each candidate; at least half of them stay."""
    if len(rounds) < 3:
        return list(rounds)
    totals = [sum(times) for times in rounds]
    limit = THROTTLED * statistics.median(totals)
    return [times for times, total in zip(rounds, totals, strict=True) if total <= limit]


def clearly_faster(median: float, spread: float, than_median: float, than_spread: float) -> bool:
    """Whether one time beats another by more than the spread of both."""
    return median + max(spread, than_spread) < than_median
