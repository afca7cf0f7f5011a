"""How a layer's time changes with its share of zeros, from the times of zeroskip.py; and what a dense input costs."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

VGG19_ZEROS = (55, 41, 24, 46, 14, 35, 96, 48, 68, 76, 81, 76, 92, 66, 81, 90)
"""Percent, conv1_1 on: of the planes in the paper's code."""

VGG19 = ((3, 64, 224), (64, 64, 224), (64, 128, 112), (128, 128, 112), (128, 256, 56), *[(256, 256, 56)] * 3,
         (256, 512, 28), *[(512, 512, 28)] * 3, *[(512, 512, 14)] * 4)  # fmt: skip
"""c, k and side of its convolutions, all 3x3."""

Shares = Mapping[float, Mapping[str, float]]
"""Percent of zeros → provider → microseconds: one layer, one way for zeros to lie."""

LEAST_POINTS = 3
"""Shares of zeros that a line is fitted to."""


@dataclass(frozen=True)
class Fall:
    """How an engine's time goes with the percentage of zeros on one layer.

    Attributes:
        correlation: Pearson's, of time and percentage: -1 where it falls on a line, 0 where zeros make no difference.
        slope_us: microseconds for each percent, by least squares.
        dense_cost: its time without zeros, as a multiple of the best dense engine's; NaN where either is missing.
        at_75: its time at 75 % zeros, as a multiple of the best dense engine's; NaN where either is missing.
    """

    correlation: float
    slope_us: float
    dense_cost: float
    at_75: float


def fall(found: Shares, provider: str, dense: str = "convoy.dense") -> Fall | None:
    """One engine's; None where it was timed at fewer than `LEAST_POINTS` shares."""
    points = [(share, times[provider]) for share, times in sorted(found.items()) if provider in times]
    if len(points) < LEAST_POINTS:
        return None
    shares, times = zip(*points, strict=True)
    level = len(set(times)) == 1
    correlation = 0.0 if level else statistics.correlation(shares, times)
    slope = statistics.linear_regression(shares, times).slope

    def quotient(share: float) -> float:
        here = found.get(share, {})
        return here[provider] / here[dense] if provider in here and dense in here else float("nan")

    return Fall(correlation, slope, quotient(0), quotient(75))
