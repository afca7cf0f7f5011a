"""Which problems are comparable, and how far apart two comparable problems are."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from convoy.problem import Conv3dProblem, ConvolutionProblem, ConvProblem, LayerProblem, LinearProblem, Problem

LAYERS: Final = (ConvProblem, Conv3dProblem, LinearProblem)
"""Problems whose time is determined by their operations."""

FILTER_PENALTY: Final = 1.0
ARITHMETIC_PENALTY: Final = 1.0
EPILOGUE_PENALTY: Final = 1.0
POOLING_PENALTY: Final = 3.0
"""Distances, in powers of two, for a different filter, arithmetic, epilogue (activation, residual) or pooling: an engine that
does not fuse runs them as extra passes. On layers left out, choices reached 0.972 of the best speed with the last two
penalties, and 0.966 without (2625 layers, H200, replay by `bench/tuning/criteria.py`); doubling the penalties changed
nothing."""

LayerKind = tuple[object, ...]


def kind_of(problem: Problem) -> LayerKind | None:
    """What two problems must have in common to be neighbours; None for problems without neighbours."""
    if isinstance(problem, LinearProblem):
        return ("linear", problem.numerics)
    if isinstance(problem, Conv3dProblem):
        grouping = "dense" if problem.groups == 1 else "depthwise" if problem.groups == problem.c else "grouped"
        return ("conv3d", problem.direction, grouping, problem.layout, *(("fresh",) if problem.dynamic_weight else ()))
    if not isinstance(problem, ConvProblem):
        return None
    p = problem
    grouping = (
        "depthwise" if p.is_depthwise else "grouped" if p.groups > 1 else "pointwise" if p.is_pointwise else "dense"
    )
    # A dynamic weight must be packed in every call, which is part of the time.
    return ("conv", p.direction, grouping, p.layout, *(("fresh",) if p.dynamic_weight else ()))


@dataclass(frozen=True, slots=True)
class LayerCoordinates:
    """A layer's position among the layers of its kind.

    Attributes:
        sizes: logarithms to base 2 of the implicit GEMM's sizes: pixels, filters, reduction.
        filters: filter size, strides and dilation, which decide which code runs.
        arithmetic: storage type and allowed rounding.
        epilogue: whether there is an activation, and whether there is a residual.
        pooled: whether a pooling ends the layer.
    """

    sizes: tuple[float, ...]
    filters: tuple[object, ...]
    arithmetic: tuple[str, str]
    epilogue: tuple[bool, bool] = (False, False)
    pooled: bool = False


def coordinates_of(problem: LayerProblem) -> LayerCoordinates:
    """A layer's coordinates."""
    p = problem
    arithmetic = (dtype_class(p.x_spec.dtype), p.numerics)
    epilogue = (p.epilogue.activation != "none", p.epilogue.residual)
    if isinstance(p, LinearProblem):
        return LayerCoordinates(_logarithms(p.n, p.k, p.c), (), arithmetic, epilogue)
    if isinstance(p, Conv3dProblem):
        sizes = _logarithms(p.pixels, p.k, p.c // p.groups * p.taps)
        return LayerCoordinates(sizes, (p.window, p.stride, p.dilation), arithmetic, epilogue)
    sizes = _logarithms(p.n * p.p * p.q, p.k, p.c // p.groups * p.r * p.s)
    filters = (p.r, p.s, p.stride_h, p.stride_w, p.dilation_h, p.dilation_w)
    return LayerCoordinates(sizes, filters, arithmetic, epilogue, p.epilogue.pool is not None)


def dtype_class(dtype: str) -> str:
    """`half` for fp16 and bf16, which run at the same speed on every device that has both; other dtypes as they are."""
    return "half" if dtype in ("fp16", "bf16") else dtype


def _logarithms(*values: int) -> tuple[float, ...]:
    return tuple(math.log2(max(1, value)) for value in values)


def distance(a: LayerCoordinates, b: LayerCoordinates) -> float:
    """Sum of the differences in every size, plus the penalties for a different filter, arithmetic, epilogue or pooling."""
    apart = sum(abs(x - y) for x, y in zip(a.sizes, b.sizes, strict=True))
    apart += FILTER_PENALTY * (a.filters != b.filters) + ARITHMETIC_PENALTY * (a.arithmetic != b.arithmetic)
    return apart + EPILOGUE_PENALTY * (a.epilogue != b.epilogue) + POOLING_PENALTY * (a.pooled != b.pooled)


def sizes_key(problem: Problem) -> str:
    """A text that is equal for problems that differ only in memory format and epilogue."""
    if isinstance(problem, ConvolutionProblem):
        return ":".join(problem.key.split(":")[:7])
    return ":".join(problem.key.split(":")[:2])
