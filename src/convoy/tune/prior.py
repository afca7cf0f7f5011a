"""Expectation: what predictions hold to be the fastest of one problem, and how far they turned out to be wrong."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from convoy.perfdb.row import Measurement
from convoy.problem import EngineConfig

MAX_PRIOR_CONFIGS: Final = 2
"""Settings that are compiled and measured first, of all engines': those predicted to be the fastest. On four nets on an H200 that
were left out in turn, the better of the two beside what needs no compiler came to 1.022 times the best of a whole search, one
alone to 1.037, four to 1.019 (replay of shipped rows, 1082 layers)."""


@dataclass(frozen=True, slots=True)
class Prior:
    """What is likely to be the fastest.

    Attributes:
        times_us: what those settings are expected to take, microseconds, the fastest first.
    """

    times_us: Mapping[EngineConfig, float] = field(default_factory=dict[EngineConfig, float])

    @staticmethod
    def of(predicted: Sequence[Measurement], compiled: Collection[EngineConfig], hopeless: float) -> Prior:
        """The likeliest of those that must be compiled.

        Args:
            predicted: a problem's predictions.
            compiled: the configs of engines that compile.
            hopeless: a setting that is expected to take this many times the best prediction is not worth compiling.
        """
        least_us = min((row.median_us for row in predicted), default=0.0)
        ranked = sorted(
            (row.median_us, index)
            for index, row in enumerate(predicted)
            if row.config in compiled and row.median_us <= hopeless * least_us
        )
        return Prior({predicted[index].config: time_us for time_us, index in ranked[:MAX_PRIOR_CONFIGS]})

    def open(self, rows: Collection[EngineConfig]) -> list[EngineConfig]:
        """Those that were not tried yet."""
        return [config for config in self.times_us if config not in rows]

    def disappointment(self, rows: Mapping[EngineConfig, Measurement]) -> float:
        """How many times longer than expected the likeliest took, in the geometric mean; 1 where they did not.

        The best of many predictions is biased low. Where the predicted winners were measured, all other predictions of the
        problem are scaled by the same error. On layers of four nets left out in turn, after `MAX_PRIOR_CONFIGS` measurements,
        choices took 1.145 times the best time with this scaling and 1.366 times without it (1520 layers, H200, replay).
        """
        measured = [row for config in self.times_us if (row := rows.get(config)) is not None and row.ok]
        if not measured:
            return 1.0
        mean = sum(math.log(row.median_us / self.times_us[row.config]) for row in measured) / len(measured)
        return max(1.0, math.exp(mean))
