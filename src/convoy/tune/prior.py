"""The configs that predictions expect to be fastest, and how far measurements contradict the predictions."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from convoy.perfdb.row import Measurement
from convoy.problem import EngineConfig

MAX_PRIOR_CONFIGS: Final = 2
"""Configs that are compiled and measured first, of all engines together: those predicted to be fastest. On four nets on an
H200, left out in turn, the better of two such configs and the engines that do not compile reached 1.022 times the best
time of a full search; one config reached 1.037, four 1.019 (replay of shipped rows, 1082 layers)."""


@dataclass(frozen=True, slots=True)
class Prior:
    """The likely winners of one problem.

    Attributes:
        times_us: predicted times of these configs, microseconds, the fastest first.
    """

    times_us: Mapping[EngineConfig, float] = field(default_factory=dict[EngineConfig, float])

    @staticmethod
    def from_predictions(
        predicted: Sequence[Measurement], compiled: Collection[EngineConfig], hopeless: float
    ) -> Prior:
        """The likely winners among the configs that must be compiled.

        Args:
            predicted: the problem's predicted rows.
            compiled: the configs of engines that compile.
            hopeless: a config predicted to take this many times the best prediction is not worth compiling.
        """
        least_us = min((row.median_us for row in predicted), default=0.0)
        ranked = sorted(
            (row.median_us, index)
            for index, row in enumerate(predicted)
            if row.config in compiled and row.median_us <= hopeless * least_us
        )
        return Prior({predicted[index].config: time_us for time_us, index in ranked[:MAX_PRIOR_CONFIGS]})

    def untried(self, rows: Collection[EngineConfig]) -> list[EngineConfig]:
        """The configs without a row."""
        return [config for config in self.times_us if config not in rows]

    def underestimate(self, rows: Mapping[EngineConfig, Measurement]) -> float:
        """How many times longer than predicted these configs took (geometric mean); 1 if they were not slower.

        The best of many predictions is biased low. Where the predicted winners were measured, all other predictions of the
        problem are scaled by the same factor. On layers of four nets left out in turn, after `MAX_PRIOR_CONFIGS`
        measurements, choices took 1.145 times the best time with this scaling and 1.366 times without it (1520 layers, H200,
        replay).
        """
        measured = [row for config in self.times_us if (row := rows.get(config)) is not None and row.ok]
        if not measured:
            return 1.0
        mean = sum(math.log(row.median_us / self.times_us[row.config]) for row in measured) / len(measured)
        return max(1.0, math.exp(mean))
