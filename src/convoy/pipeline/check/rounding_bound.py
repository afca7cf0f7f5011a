"""The allowed error of a plan in training: that of PyTorch's own run, or of the rounding that its flags allow if that is more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch

from convoy.measurement.failure import is_out_of_memory
from convoy.pipeline.check import end_to_end
from convoy.pipeline.check.end_to_end import OutputErrors

FP32_UNIT: Final = 2.0**-24
"""Unit roundoff of fp32."""


def allowed_baseline(
    errors: OutputErrors, baseline: OutputErrors, numerics: str, unit: float, rounded: Callable[[], OutputErrors]
) -> OutputErrors:
    """The errors that gradients, or results of a pass, are to be compared with (`end_to_end.why_wrong` with `LEAST_ERROR`).

    PyTorch may run exact fp32 kernels although its flags allow TF32 products; a plan may use TF32 then.

    Args:
        errors: errors of the plan's results.
        baseline: errors of PyTorch's own run.
        numerics: the rounding that the user allows.
        unit: unit roundoff of the least precise products that PyTorch's flags and the tensors' dtypes allow.
        rounded: runs PyTorch's own on inputs that are changed by one rounding each; gives the change of the results.

    Returns:
        PyTorch's own errors; those of `rounded` if the plan's errors exceed PyTorch's, products may be coarser than fp32, and
        `rounded` gives more.
    """
    allowed = max(end_to_end.WORST_ERROR * baseline.rel_l2_error, end_to_end.LEAST_ERROR)
    if errors.rel_l2_error <= allowed or numerics == "strict" or unit <= FP32_UNIT:
        return baseline
    try:
        return max(baseline, rounded(), key=lambda found: found.rel_l2_error)
    except Exception as error:  # everything: out of memory has several types; any other error is raised again
        if not is_out_of_memory(error):
            raise
    torch.cuda.empty_cache()
    return baseline
