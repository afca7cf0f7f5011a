"""Whether two runnables compute the same: bit by bit, or within the differences that one of them shows from run to run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from convoy.measurement.accuracy import relative_error
from convoy.package.tensor_file import tensor_bytes
from convoy.pipeline.check.rounding import fixed_seed
from convoy.program.runnable_program import Runnable

_OWN_RUNS: Final = 8
"""Runs of a program whose bits differ from run to run: they show how much they differ."""

_ALLOWANCE: Final = 4.0
"""Further runs may differ more than the first ones did. A fault differs by orders of magnitude more."""


@dataclass(frozen=True, slots=True)
class ResultComparison:
    """The outcome.

    Attributes:
        agree: whether all runs of the other runnable gave the same results.
        error: the largest relative error of a result; the share of differing elements where they are no floating-point numbers.
        tolerance: the largest allowed error; 0.0: results were compared bit by bit.
    """

    agree: bool
    error: float
    tolerance: float


def compare_results(own: Runnable, other: Runnable, inputs: tuple[torch.Tensor, ...], runs: int) -> ResultComparison:
    """Compare the results of two runnables for the same inputs.

    Args:
        own: the runnable that is right. It runs twice, and `_OWN_RUNS` times if the two runs give different bits.
        other: the runnable to be checked.
        inputs: inputs of both.
        runs: how often the other one runs.
    """
    with torch.no_grad():
        first, second = _results(own, inputs), _results(own, inputs)
        exact = _bits(first) == _bits(second)
        known = [second] if exact else [second, *(_results(own, inputs) for _ in range(_OWN_RUNS - 2))]
        found = [_results(other, inputs) for _ in range(runs)]
    if exact:
        agree = all(_bits(results) == _bits(first) for results in found)
        error = max((error for results in found for error in _errors(results, first)), default=0.0)
        return ResultComparison(agree, error, 0.0)
    least = [torch.finfo(one.dtype).eps if one.is_floating_point() else 0.0 for one in first]
    spreads = [max(errors) for errors in zip(*(_errors(results, first) for results in known), strict=True)]
    limits = [max(_ALLOWANCE * spread, eps) for spread, eps in zip(spreads, least, strict=True)]
    errors = [max(of_runs) for of_runs in zip(*(_errors(results, first) for results in found), strict=True)]
    agree = all(error <= limit for error, limit in zip(errors, limits, strict=True))
    return ResultComparison(agree, max(errors, default=0.0), max(limits, default=0.0))


def _results(run: Runnable, inputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """A copy on the CPU: a program may return its own buffers."""
    with fixed_seed():
        return [tensor.detach().cpu().clone() for tensor in run(inputs)]


def _bits(results: Sequence[torch.Tensor]) -> list[bytes]:
    return [bytes(tensor_bytes(tensor)) for tensor in results]


def _errors(results: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> list[float]:
    return [_error(found, right) for found, right in zip(results, wanted, strict=True)]


def _error(found: torch.Tensor, right: torch.Tensor) -> float:
    if right.is_floating_point():
        return relative_error(found, right.double())
    return float((found != right).double().mean()) if right.numel() else 0.0
