"""The error that a correct result may have, by method, dtypes and reduction length."""

from __future__ import annotations

import math
from typing import Final

from convoy.measurement.data import result_specs
from convoy.measurement.subgraph_accuracy import narrowest
from convoy.problem import LayerProblem, LayoutProblem, Problem, SubgraphProblem

EXACT_ACTIVATIONS: Final = frozenset({"none", "relu", "relu6"})

FAMILY_FACTOR: Final = {"winograd": 4.0, "fft": 2.0}
"""Factor on the error bound of a direct sum. Winograd's transforms amplify rounding: F(2x2,3x3) by 2 to 3, F(4x4,3x3) by 10
to 30 (Lavin and Gray, arXiv 1509.09308; Barabasz et al., arXiv 1803.10986); a plain sum stays five times below its bound
(0.9e-6 of 4.8e-6 at length 4608). The FFT's error grows with the logarithm of its size and is spread over the whole image,
small sums included."""

HALF_ROUNDINGS: Final = 3.0
"""Roundings to the storage type that unfused library calls may do: after the sum, the residual and the activation."""

UNIT: Final = {"fp16": 2.0**-11, "bf16": 2.0**-8}
"""Unit roundoff of the half types: the largest relative error of one rounding."""


def bound(problem: Problem, family: str, *, tf32: bool = False) -> float:
    """The relative L2 error that a result may have on normal data.

    - fp32, numerics `strict`: 0.6 · 2^-23 · sqrt(reduction length) and at least two roundings, for every family. `as_torch`:
      twice that, because libraries choose the order of their sums, times the family's factor; with TF32, the error of its
      products of 11-bit significands (2^-10, which also covers hardware that truncates).
    - Activations other than a clamp (silu, gelu, sigmoid and similar) are approximated: four more roundings.
    - fp64: the same, in units of 2^-52.
    - fp16 and bf16 storage: one rounding to it for each unfused step; sums are fp32, which tensor cores truncate (3e-5 at
      length 4608 on data of one sign). Winograd may also round transformed operands.
    - fp32 storage under numerics `half`: products rounded to bf16.

    Args:
        problem: the problem.
        family: the engine's family.
        tf32: whether the engine may use TF32 products (numerics `as_torch` on a GPU).
    """
    if isinstance(problem, LayoutProblem):
        return 0.0
    known = isinstance(problem, LayerProblem)
    length = max(problem.reduction_length, 1) if known else 64
    numerics = problem.numerics if known else "as_torch"
    dtype = storage_dtype(problem)
    factor = 1.0 if numerics == "strict" else FAMILY_FACTOR.get(family, 1.0)
    direct = max(0.6 * 2.0**-23 * math.sqrt(length), 2.0**-22) * factor
    if not known or problem.epilogue.activation not in EXACT_ACTIVATIONS:
        direct += 2.0**-21
    if dtype in UNIT:
        return (HALF_ROUNDINGS + (3.0 if factor > 1 else 0.0)) * UNIT[dtype] + direct
    if dtype == "fp64":
        return 2 * direct * 2.0**-29
    if numerics == "half":
        return HALF_ROUNDINGS * UNIT["bf16"] * (2.0 if factor > 1 else 1.0)
    if numerics == "strict":
        return direct
    inputs = (problem.x_spec.dtype, problem.weight_spec.dtype) if known else ()
    truncating = 2.0**-15 if any(d in UNIT for d in inputs) else 0.0
    return max(2 * direct, truncating, tf32_bound() * (2.0 if factor > 1 else 1.0) if tf32 else 0.0)


def tf32_bound() -> float:
    """The bound for fp32 problems computed in TF32: measured errors are about 3e-4 at any reduction length."""
    return 2.0**-10


def storage_dtype(problem: Problem) -> str:
    """The dtype that results are stored in: the narrowest floating dtype of all results, for a subgraph of all values in it."""
    if isinstance(problem, SubgraphProblem):
        return narrowest(problem)
    found = [spec.dtype for spec in result_specs(problem)]
    return next((d for d in ("bf16", "fp16", "fp32", "fp64") if d in found), "fp32")
