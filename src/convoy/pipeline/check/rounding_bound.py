"""The error that a plan in training is allowed: PyTorch's own, or what allowed products' rounding changes where that is more."""

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

    PyTorch may happen to run exact fp32 kernels where its flags allow it TF32's products, and a plan may use what they allow.

    Args:
        errors: of the plan's results.
        baseline: of PyTorch's own.
        numerics: the rounding that the user allows.
        unit: unit roundoff of the least precise products that PyTorch's flags and the tensors' dtypes allow.
        rounded: runs PyTorch's own on tensors that are off by one rounding each; gives how far its results move.

    Returns:
        PyTorch's own errors; those of `rounded` where the plan's are too large for PyTorch's, products may be coarser than
        fp32's, and `rounded` gives more.
    """
    allowed = max(end_to_end.WORST_ERROR * baseline.rel_l2_error, end_to_end.LEAST_ERROR)
    if errors.rel_l2_error <= allowed or numerics == "strict" or unit <= FP32_UNIT:
        return baseline
    try:
        return max(baseline, rounded(), key=lambda found: found.rel_l2_error)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    torch.cuda.empty_cache()
    return baseline
