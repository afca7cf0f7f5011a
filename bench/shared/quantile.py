"""Quantiles of a benchmark's samples."""

from __future__ import annotations

from collections.abc import Sequence


def quantile(values: Sequence[float], share: float) -> float:
    """The sample at a share (0 to 1) of the way from the smallest to the largest, in sorted order."""
    return sorted(values)[round(share * (len(values) - 1))]
