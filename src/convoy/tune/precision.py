"""PyTorch's precision settings, which are part of a target because they change the cost of fp32 products."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Final

from convoy.perfdb.row import Measurement
from convoy.problem import ConvolutionProblem, LinearProblem, Problem, SubgraphProblem
from convoy.target import Target

PRECISION_SETTINGS: Final = ("cudnn_tf32", "fp32_matmul", "fp32_precision", "onednn_conv")
"""Their names among a target's versions (`convoy.measurement.device.detect.precision_flags`)."""

_PRODUCTS: Final = ("mm.", "mm_", "addmm", "baddbmm", "conv", "linear", "matmul", "einsum")
"""Parts of the names of operators that multiply matrices."""


def depends_on_precision(problem: Problem) -> bool:
    """Whether PyTorch's precision settings may change a problem's time: they decide how fp32 products are rounded."""
    if isinstance(problem, ConvolutionProblem):
        return problem.numerics == "as_torch" and problem.x_dtype == "fp32"
    if isinstance(problem, LinearProblem):
        return problem.numerics == "as_torch" and problem.dtype == "fp32"
    if isinstance(problem, SubgraphProblem):
        return "fp32" in problem.text and any(part in problem.text for part in _PRODUCTS)
    return False


def equivalent_targets(target: Target, others: Collection[Target]) -> list[Target]:
    """Targets that differ only in precision settings; their rows hold here for problems that do not depend on those settings."""
    plain = _without_settings(target)
    found = [other for other in others if other.digest != target.digest and _without_settings(other) == plain]
    return sorted(found, key=lambda other: other.digest)


def reuse_rows(own: Iterable[Measurement], equivalent_rows: Iterable[Measurement], target: Target) -> list[Measurement]:
    """A target's rows, completed by the rows of equivalent targets for configs without a row of its own."""
    found = {(row.problem, row.config): row for row in own}
    for row in equivalent_rows:
        found.setdefault((row.problem, row.config), replace(row, target=target.digest))
    return list(found.values())


def _without_settings(target: Target) -> Target:
    versions = tuple((name, version) for name, version in target.versions if name not in PRECISION_SETTINGS)
    return replace(target, versions=versions, memory_bytes=0)
