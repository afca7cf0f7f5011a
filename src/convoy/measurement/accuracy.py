"""When a result is correct: the error bound of a method, and the verdict.

Direct methods are checked on integers, where every sum is exact and a single wrong term shows. All methods are checked on
normal data against a bound that depends on the method, the dtypes and the reduction length, and on cancelling data against
the sum of the terms' magnitudes. `data` makes the data, `oracle` the exact results, `guards` the guarded buffers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from convoy.engines.base import Executable
from convoy.measurement.data import Data, dense, in_layout, make_data, result_specs, tensor_specs
from convoy.measurement.error_bound import EXACT_ACTIVATIONS, FAMILY_FACTOR, bound, tf32_bound
from convoy.measurement.guards import GuardedBuffer, GuardedRun, checksum, overrun, run_guarded
from convoy.measurement.oracle import oracle, spread_norm, terms_norm
from convoy.measurement.subgraph_accuracy import MAX_FLIPPED, STOCK_ERROR_FACTOR, is_random, narrowest, stock_results
from convoy.problem import (
    ConvolutionProblem,
    LayerProblem,
    LayoutProblem,
    Problem,
    SubgraphProblem,
)
from convoy.typed_torch import l2_norm

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
"""Families whose results on integer data must be exact: they only add products."""

SMALL: Final = 4096
"""Results with at most this many elements may all be near zero by chance; their error is taken relative to the size of
typical sums."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a result is correct, its relative L2 error, its bound, and the reason if it is wrong."""

    ok: bool
    error: float
    bound: float
    reason: str = ""


def relative_error(result: torch.Tensor, exact: torch.Tensor, scale: float | None = None) -> float:
    """L2 error relative to the exact result's norm, or to `scale`; infinite if finite and non-finite values disagree."""
    found = dense(result).double()
    if not torch.equal(torch.isfinite(found), torch.isfinite(exact)):
        return math.inf
    difference = l2_norm(torch.nan_to_num(found) - torch.nan_to_num(exact))
    norm = l2_norm(torch.nan_to_num(exact)) if scale is None else scale
    return difference / norm if norm else (math.inf if difference else 0.0)


def is_exact(problem: Problem, family: str, kind: str, device: str = "cpu") -> bool:
    """Whether a result must equal the oracle's rounded value bit for bit.

    On a GPU a library may use Winograd for filters larger than 1x1 without saying so. Such a result is held to the bound,
    which no wrong kernel keeps on integers.
    """
    if isinstance(problem, LayoutProblem):
        return True
    if kind != "integer" or isinstance(problem, SubgraphProblem):
        return False
    taps = math.prod(problem.weight_spec.shape[2:]) if isinstance(problem, ConvolutionProblem) else 1
    if family == "library" and device == "cuda" and taps > 1:
        return False
    pool = problem.epilogue.pool
    # An average divides, which rounds, and differs from multiplying by the reciprocal.
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
    """Compare results with the oracle's.

    Args:
        problem: the problem.
        family: the engine's family, which decides the bound.
        results: the launch's results; None counts as not written.
        exact: the oracle's float64 results.
        kind: the data's kind. On `integer` data direct families must be exact.
        tf32: whether the engine may use TF32 products (numerics `as_torch` on a GPU).
        data: the data that the results were computed from. Kind `cancelling` needs it. With it, results of few elements that
            vanish by chance are compared with the size of sums of such terms, results of tile transforms with their size
            without padding, and results of subgraphs also with PyTorch's own error.
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
            continue  # random numbers cannot be compared: only the shape is checked
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
    """Launch once on guarded buffers filled with garbage, and compare the results with the oracle's.

    Args:
        executable: the executable to try; its exceptions pass through.
        family: its engine's family.
        problem: the problem.
        data: from `make_data(problem, seed, kind)`.
        kind: the data's kind.
        exact: the oracle's results, if they are known.
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
    """The relative error, with the norm that fits the kind of data and the method."""
    known = isinstance(problem, LayerProblem)
    if kind == "cancelling" and known:
        if data is None:
            raise ValueError("check needs `data` for kind `cancelling`: errors are relative to the sum of |x||weight|")
        scale = max(terms_norm(problem, data, index, 1), l2_norm(wanted))  # sigmoid(0) is 0.5
        if _spreads(problem, family):
            scale = max(scale, spread_norm(problem, data, index))
        return relative_error(found, wanted, scale)
    error = relative_error(found, wanted)
    if error <= limit or not known or data is None or not bool(torch.isfinite(found).all()):
        return error
    scale = norm = l2_norm(torch.nan_to_num(wanted))
    if wanted.numel() <= SMALL or norm == 0:
        scale = max(scale, terms_norm(problem, data, index, 2))
    if _spreads(problem, family):
        scale = max(scale, spread_norm(problem, data, index))
    return relative_error(found, wanted, scale) if scale > norm else error


def _spreads(problem: LayerProblem, family: str) -> bool:
    """Whether a method may spread its rounding over whole tiles: Winograd and FFT, except under `strict`."""
    return family in FAMILY_FACTOR and problem.numerics != "strict"


def _allowance(problem: Problem, data: Data | None, index: int, wanted: torch.Tensor) -> float:
    """The error that a subgraph's result may have besides its bound: a multiple of the error of PyTorch's own operators.

    A subgraph's sizes do not say how much it amplifies rounding: statistics are sums over whole images, and the gradient of a
    bias before a batch norm is a sum that vanishes. 0 if PyTorch's result is not finite in the same places.
    """
    if data is None or not isinstance(problem, SubgraphProblem):
        return 0.0
    own = stock_results(problem, data)[index]
    if not own.is_floating_point():
        return STOCK_ERROR_FACTOR * float((~_equal(own, wanted.to(own.dtype))).double().mean())
    error = relative_error(own, wanted)
    return STOCK_ERROR_FACTOR * error if math.isfinite(error) else 0.0


def _equal(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Where two tensors are equal; NaN equals only a NaN of the oracle."""
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
