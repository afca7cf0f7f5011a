"""Compute once what depends on constants alone."""

from __future__ import annotations

from typing import Final

import torch

from convoy.capture.draft import Draft
from convoy.capture.passes.remove_identities import add_copy
from convoy.engines.interpret import compile_graph
from convoy.graph.ir import Node
from convoy.graph.randomness import draws_random

MOST_GROWTH: Final = 2
"""A folded constant may have this many times the elements of what it was computed from ..."""

SMALL_ELEMENTS: Final = 1 << 20
"""... or this many: a mask expanded to a whole batch is not worth the memory."""


def fold_constants(draft: Draft) -> None:
    """Evaluate nodes that read constants alone (or nothing), such as standardised weights or position tables.

    before: %m = aten.mul.Tensor(%weight, 2.0); %y = aten.conv2d.default(%x, %m)       constant %weight
    -->
    after:  %y = aten.conv2d.default(%x, %m)                                           constant %m

    Nodes that draw random numbers stay.
    """
    kept: list[Node] = []
    for node in draft.nodes:
        if all(name in draft.constants for name in node.refs()) and _is_foldable(draft, node):
            for name, tensor in zip(filter(None, node.outputs), _evaluate(draft, node), strict=True):
                draft.constants[name] = tensor.contiguous()
        else:
            kept.append(node)
    draft.nodes = kept


def copy_returned_constants(draft: Draft) -> None:
    """Return copies of constants, so that a caller who writes to a result does not change the model.

    before: return %weight        -->        after: %copy = aten.clone.default(%weight); return %copy
    """
    for index, name in enumerate(draft.outputs):
        if name in draft.constants:
            draft.outputs[index] = add_copy(draft, name, f"{name}.copy")


def _is_foldable(draft: Draft, node: Node) -> bool:
    if draws_random(node):
        return False
    read = sum(draft.specs[source].elements for source in set(node.refs()))
    made = sum(draft.specs[output].elements for output in node.outputs if output)
    return made <= max(SMALL_ELEMENTS, MOST_GROWTH * read)


def _evaluate(draft: Draft, node: Node) -> tuple[torch.Tensor, ...]:
    names = [name for name in node.outputs if name]
    piece = Draft([], names, [node], draft.specs, {name: draft.constants[name] for name in node.refs()})
    graph, constants = piece.finish()
    with torch.no_grad(), torch.device(draft.device):
        return compile_graph(graph)([], list(constants.values()))
