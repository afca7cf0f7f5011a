"""A roofline fitted to measurements: the best rates that any measurement reached."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np

from convoy.engines.activation_sparsity import KINDS, sparsity_percent
from convoy.errors import InputError
from convoy.perfdb.time_columns import Numbers, ProblemColumns, TimeColumns
from convoy.problem import EngineConfig, Problem
from convoy.problem.layer_coordinates import LAYERS, dtype_class

LAUNCH_US: Final = 1.5
"""Time of an empty launch, used without measurements: about the cost of a kernel in a captured graph."""

PASS_FACTOR: Final = 1.1
"""A pass over memory at best, over its bytes at the memory's rate: EfficientNet-B0's first product with a gate took 20.3 us at
batch 32 on an H100, its bytes 17.9. With the bare floor it was chosen before a kernel for the whole gate."""


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

    def least_pass_us(self, floor_us: float) -> float:
        """Least time of a pass over memory whose bytes take `floor_us` at the memory's rate; 0 where that is not known."""
        return floor_us and self.launch_us + PASS_FACTOR * floor_us

    def times_us(self, problems: ProblemColumns) -> Numbers:
        """`time_us` of each problem."""
        rates = [self.flops_per_us.get(_dtype_of(text), 0.0) for text in problems.arithmetic.texts]
        rate = np.array(rates, dtype=np.float64)[problems.arithmetic.index]
        work_us = np.divide(problems.flops, rate, out=np.zeros_like(rate), where=rate > 0)
        moved_us = problems.bytes_min / self.bytes_per_us if self.bytes_per_us else np.zeros_like(rate)
        return self.launch_us + np.maximum(work_us, moved_us)


def fit_roofline(times: TimeColumns) -> Roofline:
    """The best rates of all measurements, and the shortest time. Rows of problems without facts must be left out before."""
    if not len(times):
        return Roofline({}, 0.0, LAUNCH_US)
    # Skipped operations would count as a rate.
    dense = times.taken(~np.array([_skips_zeros(text) for text in times.configs.texts])[times.configs.index])
    problems = times.problems
    with np.errstate(over="ignore"):  # of times that no device reaches, in a file that no session has written
        rates = problems.flops[dense.problem] / dense.median_us
        moved = problems.bytes_min[dense.problem] / dense.median_us
    arithmetic = problems.arithmetic.index[dense.problem]
    flops: dict[str, float] = {}
    for place, text in enumerate(problems.arithmetic.texts):
        own = rates[arithmetic == place]
        if text and len(own):
            flops[_dtype_of(text)] = max(flops.get(_dtype_of(text), 0.0), float(own.max()))
    return Roofline(flops, float(moved.max(initial=0.0)), float(times.median_us.min()))


def _dtype_of(arithmetic: str) -> str:
    return arithmetic.partition("/")[0]


@lru_cache(maxsize=1 << 14)
def _skips_zeros(config: str) -> bool:
    """Whether a config's time holds for zeros that are skipped, by its text."""
    if not any(f"{kind}=" in config for kind in KINDS):
        return False
    try:
        return bool(sparsity_percent(EngineConfig.parse(config).knobs))
    except InputError:
        return False


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
