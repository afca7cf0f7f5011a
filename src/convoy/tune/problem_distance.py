"""How far apart two comparable layers are."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from convoy.perfdb.time_columns import Flags, Indices, Numbers, ProblemColumns
from convoy.problem.layer_coordinates import LayerCoordinates

FILTER_PENALTY: Final = 1.0
ARITHMETIC_PENALTY: Final = 1.0
EPILOGUE_PENALTY: Final = 1.0
POOLING_PENALTY: Final = 3.0
"""Distances, in powers of two, for a different filter, arithmetic, epilogue (activation, residual) or pooling: an engine that
does not fuse runs them as extra passes. On layers left out, choices reached 0.972 of the best speed with the last two
penalties, and 0.966 without (2625 layers, H200, replay by `bench/tuning/criteria.py`); doubling the penalties changed
nothing."""


def distance(a: LayerCoordinates, b: LayerCoordinates) -> float:
    """Sum of the differences in every size, plus the penalties for a different filter, arithmetic, epilogue or pooling."""
    pixels, filters, reduction = (abs(x - y) for x, y in zip(a.sizes, b.sizes, strict=True))
    differs = (
        a.filters != b.filters,
        a.arithmetic != b.arithmetic,
        a.epilogue != b.epilogue,
        a.pooled != b.pooled,
    )
    return _total(pixels, filters, reduction, *differs)


def distances(here: LayerCoordinates, problems: ProblemColumns, places: Indices) -> Numbers:
    """`distance` of a layer to each of the problems at some places, to the last digit."""
    apart = np.abs(problems.sizes[places] - np.array(here.sizes))

    def differs(column: Any, text: str) -> Flags:
        return ~column.taken(places).equals(text)

    return _total(
        apart[:, 0],
        apart[:, 1],
        apart[:, 2],
        differs(problems.filters, here.filters),
        differs(problems.arithmetic, here.arithmetic),
        differs(problems.epilogues, here.epilogue),
        problems.pooled[places] != here.pooled,
    )


def _total(pixels: Any, filters: Any, reduction: Any, other: Any, arithmetic: Any, epilogue: Any, pooling: Any) -> Any:
    """The sum, in one order for numbers and for columns: sums in another order differ in the last digit."""
    apart = pixels + filters + reduction
    apart = apart + FILTER_PENALTY * other + ARITHMETIC_PENALTY * arithmetic
    return apart + EPILOGUE_PENALTY * epilogue + POOLING_PENALTY * pooling
