"""Measurements of layers as predictions use them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from convoy.errors import InputError
from convoy.problem import ConvProblem, LayerProblem, Problem, is_subgraph_key, parse_problem
from convoy.tune.fitted_roofline import Roofline
from convoy.tune.problem_distance import LAYERS, LayerCoordinates, LayerKind, coordinates_of, kind_of, sizes_key


@dataclass(frozen=True, slots=True)
class LayerSample:
    """One measurement of a config: the layer with its coordinates, its time, and the log of that time over the roofline.

    Attributes:
        problem: equal for problems that differ only in memory format and epilogue.
        traits: the layer's coordinates.
        log_ratio: log of the time over the roofline's.
        layer: the layer.
        median_us: its time, microseconds.
    """

    problem: str
    traits: LayerCoordinates
    log_ratio: float
    layer: LayerProblem
    median_us: float


@dataclass(frozen=True, slots=True)
class SampledLayer:
    """What all rows of one problem have in common.

    Attributes:
        kind: its layer kind; None for problems without neighbours.
        sizes: equal for problems that differ only in memory format and epilogue.
        traits: its coordinates; None for other problems than layers.
        roofline_us: its time at the roofline, microseconds.
    """

    kind: LayerKind | None
    sizes: str = ""
    traits: LayerCoordinates | None = None
    roofline_us: float = 0.0

    @staticmethod
    def of(problem: Problem, roofline: Roofline) -> SampledLayer:
        """What a problem's rows share, under a fitted roofline."""
        kind = kind_of(problem)
        if kind is None or not isinstance(problem, LAYERS):
            return SampledLayer(kind)
        return SampledLayer(kind, sizes_key(problem), coordinates_of(problem), roofline.time_us(problem))


@lru_cache(maxsize=1 << 14)
def problem_of_key(key: str) -> Problem | None:
    """The problem of a key, if its times say anything about other problems; else None.

    A subgraph cannot be read from its key. A layer with pruned weights does only part of its operations, so its rates hold
    for no other layer, not even for one with another mask.
    """
    if is_subgraph_key(key):
        return None
    try:
        problem = parse_problem(key, "")
    except InputError:
        return None
    return None if isinstance(problem, ConvProblem) and problem.weight_mask else problem
