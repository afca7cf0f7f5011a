"""When a result counts as right: the bound that a method must keep, and the verdict.

Direct methods are checked on integers, where every sum is exact and a single wrong term shows; all methods on ordinary
data against a bound that depends on the method, the dtypes and the length of the sums; and on cancelling data against
the sum of the terms' magnitudes. Data are made in `data`, the oracle is in `oracle`, guarded buffers in `guards`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from convoy.engines.base import Executable
from convoy.measurement.data import Data, dense, in_layout, make_data, result_specs, tensor_specs
from convoy.measurement.guards import GuardedBuffer, GuardedRun, checksum, overrun, run_guarded
from convoy.measurement.oracle import oracle, spread_norm, terms_norm
from convoy.measurement.subgraph_accuracy import MAX_FLIPPED, STOCK_ERROR_FACTOR, is_random, narrowest, stock_results
from convoy.problem import ConvProblem, LayoutProblem, LinearProblem, Problem, SubgraphProblem

__all__ = [
    "Data",
    "GuardedBuffer",
    "GuardedRun",
    "Verdict",
    "bound",
    "check",
    "checksum",
    "in_layout",
    "judge",
    "make_data",
    "oracle",
    "overrun",
    "relative_error",
    "result_specs",
    "run_guarded",
    "tensor_specs",
    "tf32_bound",
]

EXACT_FAMILIES: Final = frozenset({"gemm", "implicit_gemm", "direct", "library", "reference"})
"""Families whose results on integer data must be exact: they add products and do nothing else."""

EXACT_ACTIVATIONS: Final = frozenset({"none", "relu", "relu6"})

FAMILY_FACTOR: Final = {"winograd": 4.0, "fft": 2.0}
"""Error allowed over the bound of a direct sum. Winograd's transforms amplify rounding: F(2x2,3x3) by 2 to 3, F(4x4,3x3) by 10
30 (Lavin and Gray, arXiv 1509.09308; Barabasz et al., arXiv 1803.10986); a plain sum keeps five times below its bound
(0.9e-6 of 4.8e-6 at length 4608). The FFT's error grows with the logarithm of its size and is spread over the whole image,
small sums included."""

HALF_ROUNDINGS: Final = 3.0
"""Roundings to the storage type that unfused library calls may do: after the sum, the residual and the activation."""

UNIT: Final = {"fp16": 2.0**-11, "bf16": 2.0**-8}
"""Unit roundoff of the half types: the largest relative error of one rounding."""

SMALL: Final = 4096
"""Results of so few elements may all be near zero by chance; their error is then taken against what such sums amount to."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a result is right; its relative L2 error, the bound that it was held to, and why not."""

    ok: bool
    error: float
    bound: float
    reason: str = ""


def bound(problem: Problem, family: str, *, tf32: bool = False) -> float:
    """The relative L2 error that a result may have on ordinary data.

    - fp32, numerics `strict`: 0.6 · 2^-23 · sqrt(reduction length) and at least two roundings, whatever the family.
      `as_torch`: twice that, because libraries order their sums as they like, times the family's factor; where TF32 may be used,
      its products of 11-bit significands (2^-10, which also covers hardware that truncates).
    - Activations that are no plain cut (silu, gelu, sigmoid and their kind) are approximated: four roundings more.
    - fp64: the same, in units of 2^-52.
    - fp16 and bf16 storage: its rounding, once for each unfused step; sums are fp32's, which on tensor cores truncate
      (3e-5 at length 4608 on data of one sign). Winograd may round transformed operands too.
    - fp32 storage under numerics `half`: products rounded to bf16.

    Args:
        problem: what was computed.
        family: the engine's family.
        tf32: whether the engine may use TF32 products (numerics `as_torch` on a GPU).
    """
    if isinstance(problem, LayoutProblem):
        return 0.0
    known = isinstance(problem, (ConvProblem, LinearProblem))
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
    """Bound for fp32 problems computed in TF32: measured errors are about 3e-4 at any length."""
    return 2.0**-10


def storage_dtype(problem: Problem) -> str:
    """The dtype that results are stored in; of several, and of all inside a piece of the graph, the narrowest floating one."""
    if isinstance(problem, SubgraphProblem):
        return narrowest(problem)
    found = [spec.dtype for spec in result_specs(problem)]
    return next((d for d in ("bf16", "fp16", "fp32", "fp64") if d in found), "fp32")


def relative_error(result: torch.Tensor, exact: torch.Tensor, scale: float | None = None) -> float:
    """Error in L2, relative to the exact result's norm or to `scale`; infinite where finite and not finite disagree."""
    found = dense(result).double()
    if not torch.equal(torch.isfinite(found), torch.isfinite(exact)):
        return math.inf
    difference = float((torch.nan_to_num(found) - torch.nan_to_num(exact)).norm())
    norm = float(torch.nan_to_num(exact).norm()) if scale is None else scale
    return difference / norm if norm else (math.inf if difference else 0.0)


def is_exact(problem: Problem, family: str, kind: str, device: str = "cpu") -> bool:
    """Whether a result must equal the oracle's rounded value bit for bit.

    On a GPU a library may take Winograd's way where the filter is larger than 1x1, and says so nowhere: it is held to the
    bound, which on integers no mistake keeps.
    """
    if isinstance(problem, LayoutProblem):
        return True
    if kind != "integer" or isinstance(problem, SubgraphProblem):
        return False
    if family == "library" and device == "cuda" and isinstance(problem, ConvProblem) and problem.r * problem.s > 1:
        return False
    pool = problem.epilogue.pool
    # An average divides: it is rounded, and dividing is not what multiplying by the reciprocal is.
    averages = pool is not None and pool.kind == "avg"
    return family in EXACT_FAMILIES and problem.epilogue.activation in EXACT_ACTIVATIONS and not averages


def check(
    problem: Problem,
    family: str,
    results: Sequence[torch.Tensor | None],
    exact: Sequence[torch.Tensor],
    kind: str,
    *,
    tf32: bool = False,
    data: Data | None = None,
) -> Verdict:
    """Hold results against the oracle's.

    Args:
        problem: what was computed.
        family: the engine's family, which decides what is allowed.
        results: what a launch left; None counts as unwritten.
        exact: the oracle's float64 results.
        kind: the data's kind. On `integer` data direct families must be exact.
        tf32: whether the engine may use TF32 products (numerics `as_torch` on a GPU).
        data: what the results were computed from. Needed for kind `cancelling`; with it, results of few elements that
            vanish by chance are measured against what sums of such terms amount to, those of methods that transform
            whole tiles against what they would amount to if none of them saw padding, and those of pieces of the graph
            against PyTorch's own error too.
    """
    limit = bound(problem, family, tf32=tf32)
    worst = 0.0
    random = isinstance(problem, SubgraphProblem) and is_random(problem)
    for index, (result, wanted) in enumerate(zip(results, exact, strict=True)):
        if result is None:
            return Verdict(False, math.inf, limit, f"result {index} was not written")
        if tuple(result.shape) != tuple(wanted.shape):
            shapes = f"{tuple(result.shape)}, expected {tuple(wanted.shape)}"
            return Verdict(False, math.inf, limit, f"result {index} has shape {shapes}")
        found = dense(result)
        if random:
            continue  # numbers drawn cannot be compared: that something of this shape was written is all that can be said
        if not found.is_floating_point() and isinstance(problem, SubgraphProblem):
            changed = ~_equal(found, wanted.to(found.dtype))
            share = float(changed.double().mean()) if changed.numel() else 0.0
            if share > max(MAX_FLIPPED[narrowest(problem)], _allowance(problem, data, index, wanted)):
                return Verdict(
                    False, share, MAX_FLIPPED[narrowest(problem)], _first_wrong(index, found, wanted, changed)
                )
            continue
        if not found.is_floating_point() or is_exact(problem, family, kind, found.device.type):
            same = _equal(found, wanted.to(found.dtype))
            if not same.all():
                error = relative_error(found, wanted)
                return Verdict(False, error, 0.0, _first_wrong(index, found, wanted, ~same))
            continue
        error = _error(problem, family, index, found, wanted, kind, limit, data)
        worst = max(worst, error)
        if not error <= limit and not error <= _allowance(problem, data, index, wanted):
            far = ~((found.double() - wanted).abs() <= 1e-2 * (float(torch.nan_to_num(wanted).abs().mean()) or 1.0))
            wrong = far if far.any() else ~_equal(found, wanted.to(found.dtype))
            reason = f"error {error:.3g} over {limit:.3g}; {_first_wrong(index, found, wanted, wrong)}"
            return Verdict(False, error, limit, reason)
    return Verdict(True, worst, limit)


def judge(
    executable: Executable,
    family: str,
    problem: Problem,
    data: Data,
    kind: str,
    *,
    exact: Sequence[torch.Tensor] | None = None,
    tf32: bool = False,
) -> Verdict:
    """Launch once on guarded buffers full of garbage, and hold what comes out against the oracle.

    Args:
        executable: what to try; whatever it raises passes through.
        family: its engine's family.
        problem: what it computes.
        data: from `make_data(problem, seed, kind)`.
        kind: the data's kind.
        exact: the oracle's results, where they are known already.
        tf32: whether TF32 products are allowed.
    """
    trial = run_guarded(executable, problem, data)
    if trial.fault:
        return Verdict(False, math.inf, bound(problem, family, tf32=tf32), trial.fault)
    wanted = oracle(problem, data) if exact is None else exact
    return check(problem, family, trial.results, wanted, kind, tf32=tf32, data=data)


def _error(
    problem: Problem,
    family: str,
    index: int,
    found: torch.Tensor,
    wanted: torch.Tensor,
    kind: str,
    limit: float,
    data: Data | None,
) -> float:
    """The error, against the norm that fits the kind of data and the method."""
    known = isinstance(problem, (ConvProblem, LinearProblem))
    if kind == "cancelling" and known:
        if data is None:
            raise ValueError(
                "check needs `data` for kind `cancelling`: errors are taken against the sum of |x||weight|"
            )
        scale = max(terms_norm(problem, data, index, 1), float(wanted.norm()))  # sigmoid makes 0.5 of nothing
        if _spreads(problem, family):
            scale = max(scale, spread_norm(problem, data, index))
        return relative_error(found, wanted, scale)
    error = relative_error(found, wanted)
    if error <= limit or not known or data is None or not bool(torch.isfinite(found).all()):
        return error
    scale = norm = float(torch.nan_to_num(wanted).norm())
    if wanted.numel() <= SMALL or norm == 0:
        scale = max(scale, terms_norm(problem, data, index, 2))
    if _spreads(problem, family):
        scale = max(scale, spread_norm(problem, data, index))
    return relative_error(found, wanted, scale) if scale > norm else error


def _spreads(problem: ConvProblem | LinearProblem, family: str) -> bool:
    """Whether a method may spread its rounding over whole tiles: Winograd and FFT, but not under `strict`."""
    return family in FAMILY_FACTOR and problem.numerics != "strict"


def _allowance(problem: Problem, data: Data | None, index: int, wanted: torch.Tensor) -> float:
    """The error that a piece's result may have beside its bound: so many times that of PyTorch's own operators.

    How a piece magnifies rounding is not known from its sizes: statistics are sums over whole images, and the gradient of a
    bias before a batch norm is a sum that vanishes. 0 where PyTorch's result is not finite in the same places.
    """
    if data is None or not isinstance(problem, SubgraphProblem):
        return 0.0
    own = stock_results(problem, data)[index]
    if not own.is_floating_point():
        return STOCK_ERROR_FACTOR * float((~_equal(own, wanted.to(own.dtype))).double().mean())
    error = relative_error(own, wanted)
    return STOCK_ERROR_FACTOR * error if math.isfinite(error) else 0.0


def _equal(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Where two tensors agree; NaN agrees with nothing but a NaN that the oracle has there too."""
    same = found == wanted
    return same | (torch.isnan(found) & torch.isnan(wanted)) if found.is_floating_point() else same


def _first_wrong(index: int, found: torch.Tensor, wanted: torch.Tensor, wrong: torch.Tensor) -> str:
    where = torch.nonzero(wrong)
    if not len(where):
        return f"result {index} differs"
    at = tuple(int(i) for i in where[0])
    value = found[at].item()
    written = " (never written?)" if isinstance(value, float) and math.isnan(value) else ""
    expected = wanted[at].to(found.dtype).item()
    return f"result {index} is {value}{written} at {at}, expected {expected}; {len(where)} of {found.numel()} places differ"
