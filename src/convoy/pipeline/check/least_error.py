"""The relative error of a net's outputs that is always allowed, by numerics and dtypes."""

from __future__ import annotations

from typing import Final

from convoy.graph.ir import Graph

LEAST_STRICT_ERROR: Final = 1e-5
"""With exact products: some roundings in each layer, times the factor by which Winograd's transforms increase them."""

LEAST_LOOSE_ERROR: Final = 1e-3
"""If products of TF32 or half types are allowed: about one rounding of one layer."""

LEAST_HALF_ERROR: Final = 2.0**-5
"""For an fp32 net whose products may have operands in bf16, where PyTorch's own run has none: some tens of layers that
round by 2^-9 each."""


def least_error(numerics: str, graph: Graph | None = None) -> float:
    """The relative error of a net's outputs that is always allowed.

    Args:
        numerics: the rounding that the user allows.
        graph: the net; its values' dtypes count under `half`, where the products of an fp32 net may have operands in bf16.
    """
    if numerics == "strict":
        return LEAST_STRICT_ERROR
    dtypes = {value.spec.dtype for value in graph.values.values()} if graph is not None else set[str]()
    if numerics == "half" and "fp32" in dtypes and not dtypes & {"fp16", "bf16"}:
        return LEAST_HALF_ERROR
    return LEAST_LOOSE_ERROR
