"""Layers over the channels of channels-last values, between two permutes, as layers of images (ConvNeXt's blocks)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch

from convoy.capture.draft import Draft
from convoy.graph.ir import Arg, Node, Ref
from convoy.problem import TensorSpec

TO_LAST: Final = (0, 2, 3, 1)
"""The permute from [n, c, h, w] to [n, h, w, c]."""

TO_FIRST: Final = (0, 3, 1, 2)
"""The permute back."""

_LINEAR: Final = "aten.linear.default"
_NORM: Final = "aten.layer_norm.default"
_REDUCTIONS: Final = {"aten.mean.dim": 1, "aten.sum.dim_IntList": 1, "aten.linalg_vector_norm.default": 2}
"""Reductions by the position of their dimensions."""

POINTWISE: Final = frozenset({
    "aten.abs.default", "aten.add.Tensor", "aten.addcmul.default", "aten.clamp.default", "aten.clamp_min.default",
    "aten.div.Tensor", "aten.elu.default", "aten.exp.default", "aten.gelu.default", "aten.hardsigmoid.default",
    "aten.hardswish.default", "aten.hardtanh.default", "aten.leaky_relu.default", "aten.mish.default", "aten.mul.Tensor",
    "aten.neg.default", "aten.pow.Tensor_Scalar", "aten.relu.default", "aten.relu6.default", "aten.rsqrt.default",
    "aten.sigmoid.default", "aten.silu.default", "aten.softplus.default", "aten.sqrt.default", "aten.sub.Tensor",
    "aten.tanh.default",
})  # fmt: skip
"""Operators that compute each element from the elements at its place."""


def permuted_layers(draft: Draft) -> None:
    """Compute in [n, c, h, w] what a model computes in [n, h, w, c] between two permutes.

    before: %l = aten.permute.default(%x, (0, 2, 3, 1))               x: [n, c, h, w]
            %h = aten.linear.default(%l, %w, %b)                      w: [k, c]
            %g = aten.gelu.default(%h)
            %y = aten.permute.default(%g, (0, 3, 1, 2))
    -->
    after:  %h = aten.conv2d.default(%x, %w.filter, %b)               w.filter: [k, c, 1, 1]
            %y = aten.gelu.default(%h)

    In channels_last memory both are the same bytes. A linear layer becomes a convolution, which has more engines and epilogues,
    and whose neighbours' engines and memory formats are chosen together. A layer norm stays between two permutes. Only groups of
    nodes that read nothing but such permutes and constants, and that nothing but permutes back read, are rewritten: elsewhere a
    permute would be added, and may be a copy.
    """
    sources = {node.outputs[0]: _permuted(draft, node, TO_LAST) for node in draft.nodes}
    first = {output: source for output, source in sources.items() if source}
    chosen = _closed(draft, first)
    if not any(node.op == _LINEAR for node in chosen.values()):
        return
    rewrite = _Rewrite(draft, dict(first))
    nodes, names = draft.nodes, dict[str, str]()
    draft.nodes = []
    for node in nodes:
        if node.name in chosen:
            draft.nodes += rewrite.rewritten(node)
        elif (source := _permuted(draft, node, TO_FIRST)) in rewrite.first:
            names[node.outputs[0]] = rewrite.first[source]
        else:
            draft.nodes.append(node)
    draft.rename(names)
    drop_dead(draft)


def _permuted(draft: Draft, node: Node, order: tuple[int, ...]) -> str:
    """The 4-D value that a node permutes in this order; empty if it does something else."""
    if node.op != "aten.permute.default" or node.kwargs or len(node.args) != 2 or not isinstance(node.args[0], Ref):
        return ""
    given = node.args[1]
    rank = len(draft.specs[node.args[0].name].shape)
    if rank != 4 or not isinstance(given, tuple):
        return ""
    found = tuple(axis % 4 for axis in given if isinstance(axis, int))
    return node.args[0].name if found == order else ""


def _closed(draft: Draft, first: dict[str, str]) -> dict[str, Node]:
    """Nodes by name that read permutes, one another and constants alone, and that only one another and permutes back read."""
    found: dict[str, Node] = {}
    known = set(first)
    for node in draft.nodes:
        values = [name for name in node.refs() if name not in draft.constants]
        if values and known.issuperset(values) and _fits(draft, node):
            found[node.name] = node
            known.add(node.outputs[0])
    readers: dict[str, list[Node]] = {}
    for node in draft.nodes:
        for name in set(node.refs()):
            readers.setdefault(name, []).append(node)
    while True:
        made = {node.outputs[0] for node in found.values()}
        kept = {
            name: node
            for name, node in found.items()
            if node.outputs[0] not in draft.outputs
            and all(r.name in found or _permuted(draft, r, TO_FIRST) for r in readers.get(node.outputs[0], ()))
            and all(source in made or source in first or source in draft.constants for source in node.refs())
        }
        if len(kept) == len(found):
            return kept
        found = kept


def _fits(draft: Draft, node: Node) -> bool:
    """Whether a node can be computed in [n, c, h, w]."""
    if len(node.outputs) != 1 or len(draft.specs[node.outputs[0]].shape) != 4:
        return False
    if node.op == _LINEAR:
        x, weight, *bias = node.args
        specs = [draft.specs[arg.name] for arg in (x, weight, *bias) if isinstance(arg, Ref)]
        same = len({spec.dtype for spec in specs}) == 1
        constant = all(arg is None or (isinstance(arg, Ref) and arg.name in draft.constants) for arg in (weight, *bias))
        return not node.kwargs and same and constant and len(draft.specs[next(node.refs())].shape) == 4
    if node.op == _NORM:
        return not node.kwargs and isinstance(node.args[1], tuple) and len(node.args[1]) == 1
    if node.op in _REDUCTIONS:
        return _axes(node) is not None
    return node.op in POINTWISE and all(_is_operand(draft, name) for name in node.refs())


def _is_operand(draft: Draft, name: str) -> bool:
    """Whether a value can be given to a pointwise operator: it is 4-D, or a constant of fewer dimensions."""
    rank = len(draft.specs[name].shape)
    return rank == 4 or (name in draft.constants and rank < 4)


def _axes(node: Node) -> tuple[int, ...] | None:
    """The dimensions over which a node that keeps them reduces; None if it does not keep them."""
    at = _REDUCTIONS[node.op]
    if node.kwargs or len(node.args) != at + 2 or node.args[at + 1] is not True:
        return None
    axes = node.args[at]
    if not isinstance(axes, tuple) or not all(isinstance(axis, int) for axis in axes):
        return None
    return tuple(axis % 4 for axis in axes if isinstance(axis, int))


@dataclass(slots=True)
class _Rewrite:
    """Rewrites nodes.

    Attributes:
        draft: the graph.
        first: by channels-last value, the same value in [n, c, h, w].
    """

    draft: Draft
    first: dict[str, str]

    def rewritten(self, node: Node) -> list[Node]:
        """Nodes that make a node's value in [n, c, h, w]."""
        if node.op == _NORM:
            return self._norm(node)
        made = self._made(node)
        if node.op == _LINEAR:
            return [self._convolution(node, made)]
        if node.op in _REDUCTIONS:
            axes = tuple(TO_LAST[axis] for axis in _axes(node) or ())
            at = _REDUCTIONS[node.op]
            args: Sequence[Arg] = (*node.args[:at], axes, *node.args[at + 1 :])
        else:
            args = node.args
        moved = tuple(self._operand(arg) for arg in args)
        return [Node(made, node.op, moved, node.kwargs, (made,))]

    def _made(self, node: Node) -> str:
        """A new value of a node's shape with the channels first."""
        spec = self.draft.specs[node.outputs[0]]
        n, h, w, c = spec.shape
        name = self.draft.unique(f"{node.name}.nchw")
        self.draft.specs[name] = TensorSpec((n, c, h, w), spec.dtype)
        self.first[node.outputs[0]] = name
        return name

    def _operand(self, arg: Arg) -> Arg:
        if not isinstance(arg, Ref):
            return arg
        if arg.name in self.first:
            return Ref(self.first[arg.name])
        tensor = self.draft.constants[arg.name]
        if tensor.dim() == 0:
            return arg
        moved = tensor[(None,) * (4 - tensor.dim())].permute(TO_FIRST)
        return Ref(self.draft.add_constant(f"{arg.name}.nchw", moved))

    def _convolution(self, node: Node, made: str) -> Node:
        x, weight, *bias = node.args
        assert isinstance(x, Ref)
        assert isinstance(weight, Ref)
        matrix: torch.Tensor = self.draft.constants[weight.name]
        kernel = self.draft.add_constant(f"{weight.name}.filter", matrix[:, :, None, None])
        args = (Ref(self.first[x.name]), Ref(kernel), bias[0] if bias else None)
        return Node(made, "aten.conv2d.default", args, (), (made,))

    def _norm(self, node: Node) -> list[Node]:
        """The layer norm between permutes of its own."""
        x = node.args[0]
        assert isinstance(x, Ref)
        before = self.draft.unique(f"{node.name}.nhwc")
        self.draft.specs[before] = self.draft.specs[x.name]
        permute = Node(before, "aten.permute.default", (Ref(self.first[x.name]), TO_LAST), (), (before,))
        made = self._made(node)
        back = Node(made, "aten.permute.default", (Ref(node.outputs[0]), TO_FIRST), (), (made,))
        return [permute, replace(node, args=(Ref(before), *node.args[1:])), back]


def drop_dead(draft: Draft) -> None:
    """Drop nodes that nobody reads, so that a value's readers can be counted."""
    read = set(draft.outputs)
    kept: list[Node] = []
    for node in reversed(draft.nodes):
        if read.intersection(node.outputs):
            kept.append(node)
            read.update(node.refs())
    draft.nodes = kept[::-1]
