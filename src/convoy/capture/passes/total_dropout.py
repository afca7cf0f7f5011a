"""Draw no random numbers for a dropout with probability 1: PyTorch draws none, although its tracers write a node that does."""

from __future__ import annotations

from convoy.capture.draft import Draft
from convoy.graph.ir import Node


def total_dropout(draft: Draft) -> None:
    """Replace a dropout with probability 1 by a product with zero. Later draws then give PyTorch's numbers for the seed.

    before: %y, %m = aten.native_dropout.default(%x, 1.0, True)
    -->
    after:  %y = aten.mul.Scalar(%x, 0.0); %m = aten.lt.Tensor(%x, %x)

    The mask is false everywhere. The gradient is that of `aten.native_dropout_backward`, which multiplies by it.
    """
    draft.nodes = [made for node in draft.nodes for made in _drawn_by_pytorch(node)]


def _drawn_by_pytorch(node: Node) -> tuple[Node, ...]:
    if node.op != "aten.native_dropout.default" or node.args[1:] != (1.0, True):
        return (node,)
    x, (y, mask) = node.args[0], node.outputs
    zeros = Node(node.name, "aten.mul.Scalar", (x, 0.0), outputs=(y,))
    return (zeros, Node(mask, "aten.lt.Tensor", (x, x), outputs=(mask,))) if mask else (zeros,)
