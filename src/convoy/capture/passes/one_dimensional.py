"""1-D convolutions as 2-D ones of images with one row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from convoy.capture.draft import Draft
from convoy.capture.passes.permuted_layers import POINTWISE, drop_dead
from convoy.graph.ir import Arg, Node, Ref
from convoy.problem import TensorSpec

_CONVOLUTIONS: Final[dict[str, tuple[str, tuple[tuple[int, int], ...]]]] = {
    "aten.conv1d.default": ("aten.conv2d.default", ((3, 1), (4, 0), (5, 1))),
    "aten.conv1d.padding": ("aten.conv2d.padding", ((3, 1), (5, 1))),
    "aten.conv_transpose1d.default": ("aten.conv_transpose2d.input", ((3, 1), (4, 0), (5, 0), (7, 1))),
    "aten.convolution.default": ("aten.convolution.default", ((3, 1), (4, 0), (5, 1), (7, 0))),
}
"""1-D operator → 2-D operator, and its sizes: position, and the value for the rows."""

_NORMS: Final = frozenset(
    {
        *("aten.batch_norm.default", "aten._native_batch_norm_legit_no_training.default"),
        *("aten.native_batch_norm.default", "aten.group_norm.default"),
    }
)
_BACKWARD: Final = "aten.convolution_backward.default"
_BACKWARD_SIZES: Final = ((4, 1), (5, 0), (6, 1), (8, 0))


def one_dimensional(draft: Draft) -> None:
    """Compute convolutions of [n, c, w], and what follows them, in [n, c, 1, w].

    before: %y = aten.conv1d.default(%x, %w, %b, (2,))              x: [n, c, w], w: [k, c, s]
            %z = aten.relu.default(%y)
    -->
    after:  %x2 = aten.unsqueeze.default(%x, 2)
            %y2 = aten.conv2d.default(%x2, %w2, %b, (1, 2))         w2: [k, c, 1, s]
            %z2 = aten.relu.default(%y2)
            %z = aten.squeeze.dim(%z2, 2)

    Transposed convolutions and backward passes likewise. Pointwise operators, group norms, batch norms at inference and
    concatenations along channels stay in 2-D between convolutions, so that epilogues include them.
    """
    if not any(_is_convolution(draft, node) for node in draft.nodes):
        return
    rewrite = _Rewrite(draft, {})
    nodes, draft.nodes = draft.nodes, []
    for node in nodes:
        draft.nodes += rewrite.rewritten(node)
    drop_dead(draft)


def _is_convolution(draft: Draft, node: Node) -> bool:
    """Whether a node is a 1-D convolution of a batch, or the backward pass of one."""
    if node.op != _BACKWARD and node.op not in _CONVOLUTIONS:
        return False
    refs = [arg for arg in node.args[:3] if isinstance(arg, Ref)]
    first, weight = refs[0], refs[2] if node.op == _BACKWARD else refs[1]
    return all(len(draft.specs[arg.name].shape) == 3 for arg in (first, weight)) and not node.kwargs


@dataclass(slots=True)
class _Rewrite:
    """Rewrites nodes.

    Attributes:
        draft: the graph.
        wide: by value of three dimensions, the same value with a dimension of one row before the last.
    """

    draft: Draft
    wide: dict[str, str]

    def rewritten(self, node: Node) -> list[Node]:
        """Nodes that make a node's values."""
        if _is_convolution(self.draft, node):
            return self._backward(node) if node.op == _BACKWARD else self._convolution(node)
        if self._stays_wide(node):
            return self._wide_node(node)
        return [node]

    def _convolution(self, node: Node) -> list[Node]:
        op, sizes = _CONVOLUTIONS[node.op]
        before = [made for arg in node.args[:2] for made in self._widen(arg)]
        args = _with_rows((Ref(self.wide[_name(arg)]) for arg in node.args[:2]), node.args[2:], sizes)
        made, after = self._made(node.outputs[0])
        return [*before, Node(made, op, args, (), (made,)), after]

    def _backward(self, node: Node) -> list[Node]:
        before = [made for arg in node.args[:3] for made in self._widen(arg)]
        args = _with_rows((Ref(self.wide[_name(arg)]) for arg in node.args[:3]), node.args[3:], _BACKWARD_SIZES)
        outputs, after = list(node.outputs), list[Node]()
        for index, output in enumerate(node.outputs[:2]):
            if output:
                outputs[index], view = self._made(output)
                after.append(view)
        return [*before, replace(node, args=args, outputs=tuple(outputs)), *after]

    def _stays_wide(self, node: Node) -> bool:
        """Whether a node reads such values, and can compute them with a dimension more."""
        if not node.outputs[0] or len(self.draft.specs[node.outputs[0]].shape) != 3 or any(node.outputs[1:]):
            return False
        values = [name for name in node.refs() if name not in self.draft.constants]
        if not values or not self.wide.keys() >= set(values):
            return False
        if node.op == "aten.cat.default":
            return node.args[1:] in ((1,), (-2,)) and not node.kwargs and len(values) == len(list(node.refs()))
        if node.op in _NORMS:
            return isinstance(node.args[0], Ref) and node.args[0].name in values and len(values) == 1
        return node.op in POINTWISE

    def _wide_node(self, node: Node) -> list[Node]:
        is_norm = node.op in _NORMS
        args: tuple[Arg, ...] = tuple(
            arg if is_norm and index else self._wide_arg(arg) for index, arg in enumerate(node.args)
        )
        if node.op == "aten.cat.default":
            args = (args[0], 1)
        made, after = self._made(node.outputs[0])
        return [Node(made, node.op, args, node.kwargs, (made, *node.outputs[1:])), after]

    def _wide_arg(self, arg: Arg) -> Arg:
        if isinstance(arg, tuple):
            return tuple(self._wide_arg(item) for item in arg)
        if not isinstance(arg, Ref):
            return arg
        if arg.name in self.wide:
            return Ref(self.wide[arg.name])
        tensor = self.draft.constants[arg.name]
        return arg if tensor.dim() < 2 else Ref(self.draft.add_constant(f"{arg.name}.row", tensor.unsqueeze(-2)))

    def _widen(self, arg: Arg) -> list[Node]:
        """Make a value of three dimensions known with four; gives the node that makes it, if it takes one."""
        name = _name(arg)
        if name in self.wide:
            return []
        if name in self.draft.constants:
            self.wide[name] = self.draft.add_constant(f"{name}.row", self.draft.constants[name].unsqueeze(2))
            return []
        self.wide[name] = self._value(name)
        return [Node(self.wide[name], "aten.unsqueeze.default", (Ref(name), 2), (), (self.wide[name],))]

    def _made(self, output: str) -> tuple[str, Node]:
        """A value with a dimension more in place of a node's output, and the node that makes that output of it."""
        self.wide[output] = self._value(output)
        return self.wide[output], Node(output, "aten.squeeze.dim", (Ref(self.wide[output]), 2), (), (output,))

    def _value(self, name: str) -> str:
        spec, wide = self.draft.specs[name], self.draft.unique(f"{name}.row")
        self.draft.specs[wide] = TensorSpec((*spec.shape[:2], 1, *spec.shape[2:]), spec.dtype)
        return wide


def _name(arg: Arg) -> str:
    assert isinstance(arg, Ref)
    return arg.name


def _with_rows(values: Iterable[Arg], rest: tuple[Arg, ...], sizes: Iterable[tuple[int, int]]) -> tuple[Arg, ...]:
    """Arguments of the 2-D operator: the values, then the others, with sizes for the rows."""
    args = [*values, *rest]
    known: Mapping[int, int] = dict(sizes)
    for at, row in known.items():
        if at < len(args) and not isinstance(args[at], str):
            size = args[at]
            width = size[0] if isinstance(size, tuple) else size
            args[at] = (row, width)
    return tuple(args)
