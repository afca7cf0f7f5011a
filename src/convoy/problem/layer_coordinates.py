"""Where a layer lies among the layers of its kind, as numbers and words: what predictions compare, and what rows store."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from convoy.errors import InputError
from convoy.problem import (
    Conv3dProblem,
    ConvProblem,
    LayerProblem,
    LinearProblem,
    Problem,
    is_subgraph_key,
    parse_problem,
)

LAYERS: Final = (ConvProblem, Conv3dProblem, LinearProblem)
"""Problems whose time is determined by their operations."""

LayerKind = tuple[str, ...]

SIZES: Final = 3
"""Sizes of an implicit GEMM: pixels, filters, reduction."""


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


def kind_name(problem: Problem) -> str:
    """A layer's kind as a text; empty for problems without neighbours."""
    return "/".join(kind_of(problem) or ())


@dataclass(frozen=True, slots=True)
class LayerCoordinates:
    """A layer's position among the layers of its kind.

    Attributes:
        sizes: logarithms to base 2 of the implicit GEMM's sizes: pixels, filters, reduction.
        filters: filter size, strides and dilation, which decide which code runs; empty for a linear layer.
        arithmetic: storage type (`dtype_class`) and allowed rounding: `half/as_torch`.
        epilogue: `activation`, `residual`, both with a `+`, or nothing.
        pooled: whether a pooling ends the layer.
    """

    sizes: tuple[float, ...]
    filters: str
    arithmetic: str
    epilogue: str = ""
    pooled: bool = False


def coordinates_of(problem: LayerProblem) -> LayerCoordinates:
    """A layer's coordinates."""
    p = problem
    arithmetic = f"{dtype_class(p.x_spec.dtype)}/{p.numerics}"
    parts = (("activation", p.epilogue.activation != "none"), ("residual", p.epilogue.residual))
    epilogue = "+".join(name for name, there in parts if there)
    if isinstance(p, LinearProblem):
        return LayerCoordinates(_logarithms(p.n, p.k, p.c), "", arithmetic, epilogue)
    if isinstance(p, Conv3dProblem):
        sizes = _logarithms(p.pixels, p.k, p.c // p.groups * p.taps)
        return LayerCoordinates(sizes, _words(*p.window, *p.stride, *p.dilation), arithmetic, epilogue)
    sizes = _logarithms(p.n * p.p * p.q, p.k, p.c // p.groups * p.r * p.s)
    filters = _words(p.r, p.s, p.stride_h, p.stride_w, p.dilation_h, p.dilation_w)
    return LayerCoordinates(sizes, filters, arithmetic, epilogue, p.epilogue.pool is not None)


def dtype_class(dtype: str) -> str:
    """`half` for fp16 and bf16, which run at the same speed on every device that has both; other dtypes as they are."""
    return "half" if dtype in ("fp16", "bf16") else dtype


def _words(*values: int) -> str:
    return " ".join(map(str, values))


def _logarithms(*values: int) -> tuple[float, ...]:
    return tuple(math.log2(max(1, value)) for value in values)


def sizes_key(problem: Problem) -> str:
    """A text that is equal for problems that differ only in memory format and epilogue."""
    return sizes_of_key(problem.key)


def sizes_of_key(key: str) -> str:
    """`sizes_key` of the problem with a key."""
    return ":".join(key.split(":", 7)[: 7 if key.startswith("conv") else 2])


@dataclass(frozen=True, slots=True)
class ProblemFacts:
    """What predictions use of a problem.

    Attributes:
        kind: the layer's kind, joined by `/`; empty for problems without neighbours.
        coordinates: of a layer; for other problems there is nothing in them.
        flops: operations of a layer, else 0.
        bytes_min: least bytes to move.
    """

    kind: str
    coordinates: LayerCoordinates
    flops: int
    bytes_min: int


NO_COORDINATES: Final = LayerCoordinates((0.0,) * SIZES, "", "")


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


def facts_of_key(key: str) -> ProblemFacts | None:
    """The facts of a problem, from its key; None if its times say nothing about other problems (`problem_of_key`)."""
    problem = problem_of_key(key)
    if problem is None:
        return None
    kind = kind_name(problem)
    if not isinstance(problem, LAYERS):
        return ProblemFacts(kind, NO_COORDINATES, 0, problem.bytes_min)
    return ProblemFacts(kind, coordinates_of(problem), problem.flops, problem.bytes_min)
