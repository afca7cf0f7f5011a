"""Whether a framework gave the right numbers; without torch, because frameworks are checked in processes that have none."""

from __future__ import annotations

from typing import Final

import numpy as np

from convoy.compare.case import Case
from convoy.compare.frameworks.base import CaseInputs, Outputs

LEAST_ERROR: Final = {"fp32": 1e-5, "fp16": 1e-2, "bf16": 5e-2}
WORSE: Final = 3.0
"""An output is right within this relative L2 error, or within `WORSE` times the error of stock PyTorch on the same device: nets
with random weights magnify rounding (as in bench/inference/inference.py). An error as large as one rounding of weights and input
causes in stock PyTorch is allowed too (`rounding_limits`), because PyTorch may be close to exact by chance."""

LEAST_GRADIENT_ERROR: Final = {"fp32": 1e-3, "fp16": 5e-2, "bf16": 0.1}
WORSE_STEP: Final = 10.0
"""The same for the gradients of a whole step: sums of terms that cancel, behind batch norms over few values. ResNet-50 at batch 2
and 64 pixels: 0.6 % off in PyTorch, 1.9 % in JAX, both right; a term that is left out is a matter of tens of per cent."""

LOSS_ERROR: Final = {"fp32": 1e-2, "fp16": 2e-2, "bf16": 5e-2}
"""The same for the loss before and after the first step, relative."""


def check(case: Case, material: CaseInputs, found: Outputs) -> tuple[float, str]:
    """Compare a framework's outputs with the exact ones: the relative error, and the fault in words (empty: none)."""
    exact = material.exact()
    limits = material.facts["limits"]
    try:
        if not case.training:
            error = relative_error(found, exact)
            return error, "" if error <= limits["out"] else _too_far("outputs", error, limits["out"])
        error = relative_error(part(found, "grad:"), part(exact, "grad:"))
    except ValueError as mismatch:
        return float("inf"), str(mismatch)
    if not error <= limits["grad"]:
        return error, _too_far("gradients", error, limits["grad"])
    for name in ("loss0", "loss1"):
        off = loss_error(found, exact, name)
        if not off <= limits["loss"]:
            return error, _too_far(
                f"loss {'after' if name == 'loss1' else 'before'} the first step", off, limits["loss"]
            )
    return error, ""


def relative_error(found: Outputs, exact: Outputs) -> float:
    """Relative L2 error over all arrays together; `exact` may hold the first images alone.

    Raises:
        ValueError: other arrays or shapes than are wanted.
    """
    squared = norm = 0.0
    if set(found) != set(exact):
        raise ValueError(f"outputs are {', '.join(sorted(found))}; wanted are {', '.join(sorted(exact))}"[:400])
    for name, wanted in exact.items():
        given = np.asarray(found[name], dtype=np.float64)
        given = given[: wanted.shape[0]] if wanted.ndim else given
        if given.shape != wanted.shape:
            raise ValueError(f"{name} has the shape {given.shape}; wanted is {wanted.shape}")
        difference = given - wanted
        if not np.isfinite(difference).all():
            return float("inf")
        squared += float(np.square(difference).sum())
        norm += float(np.square(np.asarray(wanted, dtype=np.float64)).sum())
    return (squared / norm) ** 0.5 if norm else squared**0.5


def loss_error(found: Outputs, exact: Outputs, name: str) -> float:
    """How far a loss is off, relative."""
    wanted = float(exact[name])
    return abs(float(found[name]) - wanted) / max(abs(wanted), 1e-6)


def _too_far(what: str, error: float, limit: float) -> str:
    return f"{what}: relative error {error:.1e}, limit {limit:.1e}"


def part(outputs: Outputs, prefix: str) -> Outputs:
    """The arrays whose names begin so."""
    return {name: array for name, array in outputs.items() if name.startswith(prefix)}
