"""The measured layers of one kind, and which of them are nearest to a layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from convoy.perfdb.time_columns import Indices, Numbers, TimeColumns
from convoy.problem.layer_coordinates import LayerCoordinates
from convoy.tune.problem_distance import distances

MAX_NEIGHBOURS: Final = 6
"""Nearest neighbours of a config that count."""


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A measurement of a config on a layer near another one.

    Attributes:
        row: place of the measurement among all.
        apart: distance of the layer.
        median_us: its time, microseconds.
        roofline_us: the layer's time at the fitted roofline, microseconds.
    """

    row: int
    apart: float
    median_us: float
    roofline_us: float


class KindSamples:
    """The measurements of all layers of one kind.

    Args:
        times: all measurements.
        rows: places of those of this kind.
        roofline_us: each problem's time at the fitted roofline.
    """

    def __init__(self, times: TimeColumns, rows: Indices, roofline_us: Numbers) -> None:
        config = times.configs.index[rows]
        # Each config's measurements in turn, the lowest time over the roofline first.
        order = np.lexsort((times.median_us[rows] / roofline_us[times.problem[rows]], config))
        self._times, self._rows, config = times, rows[order], config[order]
        self._problems, self._problem = np.unique(times.problem[self._rows], return_inverse=True)
        self._median_us = times.median_us[self._rows]
        self._roofline_us = roofline_us[times.problem[self._rows]]
        starts = np.concatenate(([0], np.flatnonzero(np.diff(config)) + 1))[: len(rows)]
        texts = times.configs.taken(self._rows[starts]).entries()
        stops = [*starts[1:].tolist(), len(rows)]
        self._places = dict(zip(texts, zip(starts.tolist(), stops, strict=False), strict=True))

    def __contains__(self, config: str) -> bool:
        return config in self._places

    def nearest_to(self, here: LayerCoordinates) -> Callable[[str], list[Neighbour]]:
        """Gives the measurements of a config, named by its text, on the layers nearest to another one, the nearest first.

        Of two layers as far apart the one with the lower time over the roofline comes first. The config must have measurements.
        """
        apart = distances(here, self._times.problems, self._problems)[self._problem]

        def nearest(config: str) -> list[Neighbour]:
            start, stop = self._places[config]
            near = start + np.argsort(apart[start:stop], kind="stable")[:MAX_NEIGHBOURS]
            columns = (self._rows, apart, self._median_us, self._roofline_us)
            return [Neighbour(*each) for each in zip(*(column[near].tolist() for column in columns), strict=True)]

        return nearest
