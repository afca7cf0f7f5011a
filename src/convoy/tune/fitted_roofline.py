"""A roofline fitted to measurements: the best rates that any measurement reached."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from convoy.engines.activation_sparsity import sparsity_percent
from convoy.perfdb.row import Measurement
from convoy.problem import Problem
from convoy.tune.problem_distance import LAYERS, dtype_class

LAUNCH_US: Final = 1.5
"""Time of an empty launch, used without measurements: about the cost of a kernel in a captured graph."""


@dataclass(frozen=True, slots=True)
class Roofline:
    """The best rates that any measurement reached: operations and bytes a microsecond, by dtype class."""

    flops_per_us: Mapping[str, float]
    bytes_per_us: float
    launch_us: float

    def time_us(self, problem: Problem) -> float:
        """Time of a problem at these rates, never less than a launch."""
        rate = self.flops_per_us.get(dtype_class(problem.x_spec.dtype)) if isinstance(problem, LAYERS) else None
        work_us = problem.flops / rate if rate else 0.0
        moved_us = problem.bytes_min / self.bytes_per_us if self.bytes_per_us else 0.0
        return self.launch_us + max(work_us, moved_us)


def fit_roofline(known: Sequence[tuple[Problem, Measurement]]) -> Roofline:
    """The best rates of all measurements, and the shortest time."""
    launch_us = min((row.median_us for _, row in known), default=LAUNCH_US)
    flops: dict[str, float] = {}
    moved = 0.0
    last, size_bytes, operations = None, 0, 0
    for problem, row in known:
        if problem is not last:  # rows of one problem follow one another
            last, size_bytes = problem, problem.bytes_min
            operations = problem.flops if isinstance(problem, LAYERS) else 0
        if sparsity_percent(row.config.knobs):  # skipped operations would count as a rate
            continue
        moved = max(moved, size_bytes / row.median_us)
        if isinstance(problem, LAYERS):
            width = dtype_class(problem.x_spec.dtype)
            flops[width] = max(flops.get(width, 0.0), operations / row.median_us)
    return Roofline(flops, moved, launch_us)


def at_least(time_us: float, floor_us: float) -> float:
    """A predicted time, not below the floor; of two that would be, the shorter stays the shorter.

    Winograd, FFT and engines that skip zeros can be faster than the floor of a direct, dense algorithm. Measurements show when
    they are; a prediction that promises it is more often wrong.
    """
    if time_us >= (1 + _BELOW_FLOOR) * floor_us:
        return time_us
    return floor_us + _BELOW_FLOOR / (1 + _BELOW_FLOOR) * time_us


_BELOW_FLOOR: Final = 0.001
"""Share of the floor over which predictions below it are spread, above it, so that their order stays."""
