"""What problems have in common: their kind, how far apart two of one kind are, and which differ in form alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from convoy.problem import ConvProblem, LinearProblem, Problem

LAYERS: Final = (ConvProblem, LinearProblem)
"""Problems whose times are those of their operations."""

FILTER_PENALTY: Final = 1.0
ARITHMETIC_PENALTY: Final = 1.0
EPILOGUE_PENALTY: Final = 1.0
POOLING_PENALTY: Final = 3.0
"""Distances, in powers of two, that another filter, another arithmetic, other passes behind the sum, or a pooling there amount
to: an engine that fuses nothing pays for them. On layers left out the choice came to 0.972 of the best speed with the last two,
and to 0.966 without (2625 layers, H200, replay by `bench/tuning/criteria.py`); twice the distances changed nothing."""

LayerKind = tuple[object, ...]


def kind_of(problem: Problem) -> LayerKind | None:
    """What two problems must have in common to be neighbours; None for problems that have none."""
    if isinstance(problem, LinearProblem):
        return ("linear", problem.numerics)
    if not isinstance(problem, ConvProblem):
        return None
    p = problem
    grouping = (
        "depthwise" if p.is_depthwise else "grouped" if p.groups > 1 else "pointwise" if p.is_pointwise else "dense"
    )
    # Where the weight changes from call to call, arranging it is part of the time.
    return ("conv", p.direction, grouping, p.layout, *(("fresh",) if p.dynamic_weight else ()))


@dataclass(frozen=True, slots=True)
class LayerCoordinates:
    """Where a problem lies among those of its kind.

    Attributes:
        sizes: of its implicit GEMM (pixels, filters, reduction), logarithms to the base 2.
        filters: what else decides which code runs: filter, strides, dilation.
        arithmetic: storage and the rounding allowed.
        finish: passes behind the sum: whether an activation, whether a residual.
        pooled: whether a pooling ends it.
    """

    sizes: tuple[float, ...]
    filters: tuple[object, ...]
    arithmetic: tuple[str, str]
    finish: tuple[bool, bool] = (False, False)
    pooled: bool = False


def coordinates_of(problem: ConvProblem | LinearProblem) -> LayerCoordinates:
    """A layer's traits."""
    p = problem
    arithmetic = (dtype_class(p.x_spec.dtype), p.numerics)
    finish = (p.epilogue.activation != "none", p.epilogue.residual)
    if isinstance(p, LinearProblem):
        return LayerCoordinates(_logarithms(p.n, p.k, p.c), (), arithmetic, finish)
    sizes = _logarithms(p.n * p.p * p.q, p.k, p.c // p.groups * p.r * p.s)
    filters = (p.r, p.s, p.stride_h, p.stride_w, p.dilation_h, p.dilation_w)
    return LayerCoordinates(sizes, filters, arithmetic, finish, p.epilogue.pool is not None)


def dtype_class(dtype: str) -> str:
    """fp16 and bf16 run at the same speed on every device that has both."""
    return "half" if dtype in ("fp16", "bf16") else dtype


def _logarithms(*values: int) -> tuple[float, ...]:
    return tuple(math.log2(max(1, value)) for value in values)


def distance(a: LayerCoordinates, b: LayerCoordinates) -> float:
    """Sum of the differences in every size, and what another filter, arithmetic or finish adds."""
    apart = sum(abs(x - y) for x, y in zip(a.sizes, b.sizes, strict=True))
    apart += FILTER_PENALTY * (a.filters != b.filters) + ARITHMETIC_PENALTY * (a.arithmetic != b.arithmetic)
    return apart + EPILOGUE_PENALTY * (a.finish != b.finish) + POOLING_PENALTY * (a.pooled != b.pooled)


def sizes_key(problem: Problem) -> str:
    """Equal for problems that differ in nothing but memory format and epilogue."""
    if isinstance(problem, ConvProblem):
        return ":".join(problem.key.split(":")[:7])
    return ":".join(problem.key.split(":")[:2])
