"""Lowering: an exported FX graph to the IR. Identities go, constants are computed, convolutions get their own operator."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from convoy.engines.interpret import DTYPES
from convoy.errors import CaptureError
from convoy.graph.ir import Arg, Graph, Node, Ref, Symbol, Value
from convoy.graph.rebuild import rebuild
from convoy.problem import TensorSpec

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

_IDENTITIES = frozenset(
    {
        "aten.alias.default",
        "aten.clone.default",
        "aten.contiguous.default",
        "aten.detach.default",
        "aten.detach_.default",
        "aten.dropout.default",
        "aten.feature_dropout.default",
        "aten.lift_fresh_copy.default",
        "aten.native_dropout.default",
    }
)
"""Operators that give their first argument's values in inference; memory format is selection's business."""

_MEMORY_FORMATS = {
    torch.contiguous_format: "memory_format.nchw",
    torch.channels_last: "memory_format.nhwc",
    torch.preserve_format: "memory_format.preserve",
}


class Lowering:
    """Walks an exported graph once.

    Args:
        source: the exported FX graph.
        inputs: names of the placeholders that are the net's inputs.
        given: tensors of the other placeholders, by placeholder name.
        targets: qualified names of those tensors in the model, for people.
    """

    def __init__(
        self, source: fx.Graph, inputs: Sequence[str], given: dict[str, torch.Tensor], targets: dict[str, str]
    ) -> None:
        self._source = source
        self._inputs = list(inputs)
        self._known: dict[fx.Node, Any] = {}
        """FX node → its tensor (or tuple of tensors), where it depends on constants alone."""
        self._alias: dict[str, str] = {}
        """FX name → name of the value that it is."""
        self._nodes: list[Node] = []
        self._values: dict[str, Value] = {}
        self._constants: dict[str, torch.Tensor] = {}
        self._taken = {node.name for node in source.nodes}
        for node in source.nodes:
            self._visit(node, given, targets)

    def name_of(self, fx_name: str) -> str:
        """The value that an FX name stands for."""
        name = self._alias.get(fx_name, fx_name)
        if name not in self._values:
            for node, tensor in self._known.items():
                if node.name == name and isinstance(tensor, torch.Tensor):
                    return self._constant(node, tensor)
            raise CaptureError(f"the model returns {fx_name}, which no operator makes")
        return name

    def finish(self, outputs: Sequence[str]) -> tuple[Graph, dict[str, torch.Tensor]]:
        """The graph without dead code, and its constants."""
        graph = rebuild(tuple(self._inputs), tuple(outputs), self._values, self._nodes)
        return graph, {value.name: self._constants[value.name] for value in graph.constants()}

    def _visit(self, node: fx.Node, given: dict[str, torch.Tensor], targets: dict[str, str]) -> None:
        if node.op == "placeholder":
            if node.name in self._inputs:
                self._values[node.name] = Value(node.name, _spec(node.meta["val"], node.name), "input")
            elif node.name in given:
                self._known[node] = given[node.name]
                self._alias[node.name] = self._free(targets.get(node.name, node.name))
        elif node.op == "call_function":
            self._call(node)
        elif node.op != "output":
            raise CaptureError(f"the exported graph holds {node.op} {node.target}, which cannot be lowered")

    def _free(self, name: str) -> str:
        """A value name made of a qualified name, that nobody has."""
        word = "".join(ch if ch.isalnum() or ch in "._" else "_" for ch in name)
        word = word if word[:1].isalpha() else f"c_{word}"
        while word in self._taken or word in self._values:
            word += "_"
        self._taken.add(word)
        return word

    def _call(self, node: fx.Node) -> None:
        arguments = fx.node.map_arg((node.args, node.kwargs), lambda n: n)
        sources = [n for n in node.all_input_nodes if n not in self._known]
        if not sources and node.target is not operator.getitem:
            args, kwargs = fx.node.map_arg(arguments, lambda n: self._known[n])
            self._known[node] = node.target(*args, **kwargs)
            return
        if node.target is operator.getitem:
            self._getitem(node)
            return
        op = str(node.target)
        if not op.startswith("aten."):
            raise CaptureError(f"{node.name} calls {op}, which is no ATen operator")
        if op in _IDENTITIES and isinstance(node.args[0], fx.Node):
            self._alias[node.name] = self._ref(node.args[0]).name
            return
        made = node.meta["val"]
        many = isinstance(made, (tuple, list))
        outputs = tuple("" for _ in made) if many else (node.name,)
        args = tuple(self._arg(a) for a in node.args)
        kwargs = tuple((name, self._arg(a)) for name, a in node.kwargs.items() if name != "pin_memory")
        if not many:
            self._values[node.name] = Value(node.name, _spec(made, node.name), "node")
        self._nodes.append(self._special(Node(node.name, op, args, kwargs, outputs)))

    def _getitem(self, node: fx.Node) -> None:
        source, index = node.args
        assert isinstance(source, fx.Node)
        if source in self._known:
            self._known[node] = self._known[source][index]
            return
        for at, candidate in enumerate(self._nodes):
            if candidate.name == source.name:
                outputs = list(candidate.outputs)
                if outputs[index]:
                    self._alias[node.name] = outputs[index]
                    return
                outputs[index] = node.name
                self._values[node.name] = Value(node.name, _spec(node.meta["val"], node.name), "node")
                self._nodes[at] = Node(candidate.name, candidate.op, candidate.args, candidate.kwargs, tuple(outputs))
                return
        raise CaptureError(f"{node.name} takes a part of {source.name}, which no operator makes")

    def _special(self, node: Node) -> Node:
        """`conv2d` and `linear` where the IR's own operators fit; the ATen operator as it was everywhere else."""
        if node.op == "aten.linear.default" and len(self._values[_name(node.args[0])].spec.shape) == 2:
            bias = node.args[2] if len(node.args) > 2 else None
            return Node(node.name, "linear", (node.args[0], node.args[1], bias), (), node.outputs)
        if node.op in ("aten.conv2d.default", "aten.conv2d.padding"):
            return self._convolution(node)
        return node

    def _convolution(self, node: Node) -> Node:
        given = dict(zip(("x", "weight", "bias", "stride", "padding", "dilation", "groups"), node.args, strict=False))
        given |= dict(node.kwargs)
        x, weight = self._values[_name(given["x"])].spec, self._values[_name(given["weight"])].spec
        stride, dilation = _pair(given.get("stride", 1)), _pair(given.get("dilation", 1))
        padding = given.get("padding", 0)
        if padding == "valid":
            padding = 0
        elif padding == "same":
            wanted = [d * (side - 1) for d, side in zip(dilation, weight.shape[2:], strict=True)]
            if any(total % 2 for total in wanted):
                return node  # more padding on one side: stays as it is
            padding = tuple(total // 2 for total in wanted)
        if len(x.shape) != 4 or self._values[_name(given["weight"])].kind != "constant":
            return node
        args = (
            given["x"],
            given["weight"],
            given.get("bias"),
            stride,
            _pair(padding),
            dilation,
            given.get("groups", 1),
        )
        return Node(node.name, "conv2d", args, (), node.outputs)

    def _ref(self, node: fx.Node) -> Ref:
        if node in self._known:
            return Ref(self._constant(node, self._known[node]))
        return Ref(self._alias.get(node.name, node.name))

    def _constant(self, node: fx.Node, tensor: torch.Tensor) -> str:
        name = self._alias.get(node.name)
        if name is None:
            name = self._alias[node.name] = self._free(node.name)
        if name not in self._values:
            self._values[name] = Value(name, _spec(tensor, name), "constant")
            self._constants[name] = tensor.detach().contiguous()
        return name

    def _arg(self, arg: Any) -> Arg:
        if isinstance(arg, fx.Node):
            return self._ref(arg)
        if isinstance(arg, (list, tuple)):
            return tuple(self._arg(item) for item in arg)
        if arg is None or isinstance(arg, (bool, int, float, str)):
            return arg
        if isinstance(arg, torch.dtype) and arg in DTYPE_NAMES:
            return Symbol(f"dtype.{DTYPE_NAMES[arg]}")
        if isinstance(arg, torch.memory_format) and arg in _MEMORY_FORMATS:
            return Symbol(_MEMORY_FORMATS[arg])
        if isinstance(arg, torch.device):
            return Symbol("device.inputs")
        if arg is torch.strided:
            return Symbol("layout.strided")
        raise CaptureError(f"an operator takes {arg!r}, which the graph cannot hold (shapes must be fixed)")


def _name(arg: Arg) -> str:
    if not isinstance(arg, Ref):
        raise CaptureError(f"an operator takes {arg!r} where a tensor was expected")
    return arg.name


def _pair(arg: Arg) -> tuple[Arg, Arg]:
    if isinstance(arg, tuple):
        return (arg[0], arg[0]) if len(arg) == 1 else (arg[0], arg[1])
    return (arg, arg)


def _spec(tensor: Any, name: str) -> TensorSpec:
    if not isinstance(tensor, torch.Tensor):
        raise CaptureError(f"{name} is a {type(tensor).__name__}, not a tensor")
    if tensor.dtype not in DTYPE_NAMES:
        raise CaptureError(f"{name} has dtype {tensor.dtype}, which Convoy does not know")
    if not all(isinstance(side, int) for side in tensor.shape):
        raise CaptureError(f"{name} has a shape that depends on data: {tuple(tensor.shape)}")
    return TensorSpec(tuple(tensor.shape), DTYPE_NAMES[tensor.dtype])
