"""The check of a model whose parts programs compute: its outputs against the stock module's, to the effect of rounding."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import torch
from torch import nn

from convoy.errors import CaptureError
from convoy.pipeline.check import end_to_end
from convoy.pipeline.check.least_error import least_error
from convoy.pipeline.check.rounding import InputPerturbation, fixed_seed, unit_roundoff
from convoy.pipeline.isolation import IsolatedCopy
from convoy.program.calls import map_tensors
from convoy.report.summary import Summary

PERTURBED_RUNS: Final = 3
"""Runs of the stock module with rounded parts: whether a box is kept, say, changes in some of them only."""


def check_outputs(
    copies: Callable[[], tuple[IsolatedCopy, IsolatedCopy]],
    parts: Mapping[str, Summary],
    numerics: str,
    reason: str,
) -> tuple[end_to_end.OutputErrors, str]:
    """Compare a model with replaced parts with the stock module, from the same state and random numbers.

    Each part was compared with float64 before. The outputs of the whole may still differ by far if the model compares numbers:
    a detector keeps another box of two that overlap. This is allowed if the stock module's outputs differ as far when the
    results of its own parts are changed by the parts' errors.

    Args:
        copies: makes a stock module and one with replaced parts, each with arguments.
        parts: summaries of the replaced parts, by qualified name.
        numerics: `Settings.numerics`.
        reason: why the model was not captured whole, for errors.

    Returns:
        The errors, and a note for the plan; empty if the outputs agree.

    Raises:
        CaptureError: the outputs are wrong, or the model cannot run with replaced parts.
    """
    stock, trial = copies()
    theirs = _outputs(stock)
    try:
        mine = _outputs(trial)
    except Exception as error:  # glue between the parts is the user's code: `for layer in self.layers`, say
        words = str(error).partition("\n")[0]
        raise CaptureError(f"{reason}; with its parts replaced it raises {type(error).__name__}: {words}") from error
    found = _error(mine, theirs)
    least = least_error(numerics)
    if found.rel_l2_error <= least:
        return found, ""
    allowed = max(least, end_to_end.WORST_ERROR * _effect_of_rounding(copies, parts, theirs))
    if not found.rel_l2_error <= allowed:
        raise CaptureError(f"{reason}; {_in_words(found)} and rounding explains {allowed:.1e}")
    note = f"{_in_words(found)}: rounding changes which values the model keeps; each part agrees with float64"
    return found if math.isfinite(found.rel_l2_error) else end_to_end.OutputErrors(0.0, 0.0), note


def _in_words(found: end_to_end.OutputErrors) -> str:
    if math.isinf(found.rel_l2_error):
        return "with its parts replaced its outputs have other shapes"
    return f"with its parts replaced its outputs have an error of {found.rel_l2_error:.1e} (relative L2)"


def _outputs(isolated: IsolatedCopy) -> list[torch.Tensor]:
    with torch.no_grad(), fixed_seed():
        return end_to_end.detached_outputs(isolated.model(*isolated.args, **isolated.kwargs))


def _error(mine: list[torch.Tensor], theirs: list[torch.Tensor]) -> end_to_end.OutputErrors:
    """Errors against the stock module's outputs; infinite where the shapes differ."""
    if [tensor.shape for tensor in theirs] != [tensor.shape for tensor in mine]:
        return end_to_end.OutputErrors(math.inf, math.inf)
    return end_to_end.errors_against(mine, [tensor.double() for tensor in theirs])


def _effect_of_rounding(
    copies: Callable[[], tuple[IsolatedCopy, IsolatedCopy]], parts: Mapping[str, Summary], theirs: list[torch.Tensor]
) -> float:
    """The largest change of the stock module's outputs when its parts' results change by the parts' errors."""
    dtypes: Iterable[torch.dtype] = {tensor.dtype for tensor in theirs}
    unit = unit_roundoff(dtypes, cuda=any(tensor.is_cuda for tensor in theirs))
    perturbed = {
        path: InputPerturbation(max(unit, summary.rel_l2_error, summary.baseline_rel_l2_error))
        for path, summary in parts.items()
    }
    effects: list[float] = []
    for _ in range(PERTURBED_RUNS):
        stock, _ = copies()
        for path, change in perturbed.items():
            stock.model.get_submodule(path).register_forward_hook(_changed_by(change))
        effects.append(_error(_outputs(stock), theirs).rel_l2_error)
    return max(effects)


def _changed_by(change: InputPerturbation) -> Callable[[nn.Module, Any, Any], Any]:
    def hook(module: nn.Module, given: Any, made: Any) -> Any:
        del module, given
        return map_tensors(change, made)

    return hook
