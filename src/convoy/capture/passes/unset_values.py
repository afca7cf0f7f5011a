"""Fill tensors that PyTorch allocates and leaves unset with zeros: results computed from unset memory cannot be compared."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import torch

from convoy.capture.draft import Draft
from convoy.capture.passes.fold_constants import SMALL_ELEMENTS
from convoy.engines.torch_operators import DTYPES
from convoy.graph.ir import Node

_FILLED: Final = {
    "aten.empty.memory_format": "aten.zeros.default",
    "aten.empty_like.default": "aten.zeros_like.default",
    "aten.new_empty.default": "aten.new_zeros.default",
}
"""The same operators with zeros."""

_UNSET: Final = frozenset({
    *_FILLED, "aten.empty_permuted.default", "aten.empty_strided.default", "aten.new_empty_strided.default",
})  # fmt: skip


def unset_values(draft: Draft) -> None:
    """Let tensors that are allocated for random numbers hold zeros, which nobody reads: small ones are constants.

    before: %e = aten.new_empty.default(%x, (8, 64, 1, 1)); %m = aten.bernoulli.p(%e, 0.9)
    -->
    after:  %m = aten.bernoulli.p(%e, 0.9)                                              constant %e

    Stochastic depth and the dropout of whole channels are written like this.
    """
    kept: list[Node] = []
    for node in draft.nodes:
        if node.op in _UNSET and draft.specs[node.outputs[0]].elements <= SMALL_ELEMENTS:
            spec = draft.specs[node.outputs[0]]
            draft.constants[node.outputs[0]] = torch.zeros(spec.shape, dtype=DTYPES[spec.dtype], device=draft.device)
        else:
            kept.append(_filled(node) if node.op in _FILLED else node)
    draft.nodes = kept


def _filled(node: Node) -> Node:
    """The operator with zeros; `zeros` takes no memory format, which is no part of a value anyway."""
    kwargs = tuple(pair for pair in node.kwargs if pair[0] != "memory_format" or node.op.startswith("aten.empty_like."))
    return replace(node, op=_FILLED[node.op], kwargs=kwargs)
