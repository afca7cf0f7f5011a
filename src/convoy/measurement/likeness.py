"""What problems have in common: their kind, how far apart two of one kind are, and which differ in form alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from convoy.problem import ConvProblem, LinearProblem, Problem

LAYERS: Final = (ConvProblem, LinearProblem)
"""Problems whose times are those of their operations."""

OTHER_FILTER: Final = 1.0
OTHER_ARITHMETIC: Final = 1.0
"""Distances, in powers of two, that another filter or another arithmetic amounts to."""

Kind = tuple[object, ...]


def kind_of(problem: Problem) -> Kind | None:
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
    return ("conv", p.direction, grouping, p.layout, *(("fresh",) if p.fresh_weight else ()))


@dataclass(frozen=True, slots=True)
class Traits:
    """Where a problem lies among those of its kind.

    Attributes:
        sizes: of its implicit GEMM (pixels, filters, reduction), logarithms to the base 2.
        filters: what else decides which code runs: filter, strides, dilation.
        arithmetic: storage and the rounding allowed.
    """

    sizes: tuple[float, ...]
    filters: tuple[object, ...]
    arithmetic: tuple[str, str]


def traits_of(problem: ConvProblem | LinearProblem) -> Traits:
    """A layer's traits."""
    p = problem
    arithmetic = (width_of(p.x_spec.dtype), p.numerics)
    if isinstance(p, LinearProblem):
        return Traits(_logarithms(p.n, p.k, p.c), (), arithmetic)
    sizes = _logarithms(p.n * p.p * p.q, p.k, p.c // p.groups * p.r * p.s)
    return Traits(sizes, (p.r, p.s, p.stride_h, p.stride_w, p.dilation_h, p.dilation_w), arithmetic)


def width_of(dtype: str) -> str:
    """fp16 and bf16 run at the same speed on every device that has both."""
    return "half" if dtype in ("fp16", "bf16") else dtype


def _logarithms(*values: int) -> tuple[float, ...]:
    return tuple(math.log2(max(1, value)) for value in values)


def distance(a: Traits, b: Traits) -> float:
    """Sum of the differences in every size, and what another filter or another arithmetic adds."""
    apart = sum(abs(x - y) for x, y in zip(a.sizes, b.sizes, strict=True))
    return apart + OTHER_FILTER * (a.filters != b.filters) + OTHER_ARITHMETIC * (a.arithmetic != b.arithmetic)


def sizes_key(problem: Problem) -> str:
    """Equal for problems that differ in nothing but memory format and epilogue."""
    if isinstance(problem, ConvProblem):
        return ":".join(problem.key.split(":")[:7])
    return ":".join(problem.key.split(":")[:2])
