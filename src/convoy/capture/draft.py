"""Draft: a graph in the making, with its constants' tensors. The passes of `capture` read one and change it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import torch

from convoy.engines.torch_operators import DTYPES
from convoy.errors import REPORT, CaptureError, InputError
from convoy.graph.ir import Arg, Graph, Node, Ref, Value, ValueKind
from convoy.graph.rebuild import rebuild
from convoy.graph.verify import verify
from convoy.problem import TensorSpec

_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(slots=True)
class Draft:
    """A graph whose nodes may still be replaced; dead nodes and values are dropped by `finish`.

    Attributes:
        inputs: names of the inputs.
        outputs: names of the values returned.
        nodes: in execution order.
        specs: spec of every value.
        constants: tensor of every constant.
        device: where the model's tensors are.
        notes: what the user should know, one line each.
    """

    inputs: list[str] = field(default_factory=list[str])
    outputs: list[str] = field(default_factory=list[str])
    nodes: list[Node] = field(default_factory=list[Node])
    specs: dict[str, TensorSpec] = field(default_factory=dict[str, TensorSpec])
    constants: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    notes: list[str] = field(default_factory=list[str])

    @staticmethod
    def of(graph: Graph, constants: Mapping[str, torch.Tensor]) -> Draft:
        """A draft of a finished graph."""
        specs = {value.name: value.spec for value in graph.values.values()}
        return Draft(list(graph.inputs), list(graph.outputs), list(graph.nodes), specs, dict(constants))

    def unique(self, wanted: str) -> str:
        """A value name that is free: `wanted` with other characters than letters, digits, `_` and `.` replaced."""
        base = re.sub(r"[^A-Za-z0-9_.]", "_", wanted).strip(".") or "value"
        name, count = base, 0
        while name in self.specs or name == "_":
            count += 1
            name = f"{base}_{count}"
        return name

    def add_constant(self, wanted: str, tensor: torch.Tensor) -> str:
        """Keep a tensor as a new constant, contiguous and without gradient; gives its name."""
        name = self.unique(wanted)
        self.constants[name] = tensor.detach().contiguous()
        self.specs[name] = spec_of(tensor, name)
        return name

    def read_counts(self) -> Counter[str]:
        """How often each value is read: once for each node that reads it, once more for each return."""
        counts = Counter(self.outputs)
        for node in self.nodes:
            counts.update(set(node.refs()))
        return counts

    def rename(self, names: Mapping[str, str]) -> None:
        """Read other values instead of those named, in every node and output."""
        self.nodes = [renamed(node, names) for node in self.nodes]
        self.outputs = [names.get(name, name) for name in self.outputs]

    def finish(self) -> tuple[Graph, dict[str, torch.Tensor]]:
        """The graph without dead nodes and values, with its constants in order of first mention."""
        kinds: dict[str, ValueKind] = {
            **dict.fromkeys(self.inputs, "input"),
            **dict.fromkeys(self.constants, "constant"),
        }
        values = {name: Value(name, spec, kinds.get(name, "node")) for name, spec in self.specs.items()}
        graph = rebuild(tuple(self.inputs), tuple(self.outputs), values, self.nodes)
        return graph, {value.name: self.constants[value.name] for value in graph.constants()}


def spec_of(tensor: torch.Tensor, name: str) -> TensorSpec:
    """The spec of a real or fake tensor.

    Raises:
        CaptureError: a shape that depends on data, a sparse or quantised tensor, or a dtype without a name here.
    """
    sides = cast("Sequence[object]", tensor.shape)  # those of a fake tensor may be symbols
    if not all(isinstance(side, int) for side in sides):
        raise CaptureError(f"the shape of {name} depends on data: {tuple(tensor.shape)}")
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.dtype not in _DTYPE_NAMES:
        expected = ", ".join(DTYPES)
        raise CaptureError(f"{name} is a {tensor.layout} tensor of {tensor.dtype}; expected a dense one of {expected}")
    return TensorSpec(tuple(tensor.shape), _DTYPE_NAMES[tensor.dtype])


def dtype_name(dtype: torch.dtype) -> str:
    """Convoy's name of a dtype; raises CaptureError where there is none."""
    if dtype not in _DTYPE_NAMES:
        raise CaptureError(f"the model uses {dtype}; expected one of {', '.join(DTYPES)}")
    return _DTYPE_NAMES[dtype]


def renamed(node: Node, names: Mapping[str, str]) -> Node:
    """The node with other values read."""
    if not any(name in names for name in node.refs()):
        return node
    return replace(
        node,
        args=tuple(_renamed_arg(arg, names) for arg in node.args),
        kwargs=tuple((key, _renamed_arg(arg, names)) for key, arg in node.kwargs),
    )


def _renamed_arg(arg: Arg, names: Mapping[str, str]) -> Arg:
    if isinstance(arg, Ref):
        return Ref(names.get(arg.name, arg.name))
    if isinstance(arg, tuple):
        return tuple(_renamed_arg(item, names) for item in arg)
    return arg


def verify_captured(graph: Graph) -> None:
    """Check every rule of a graph that capture made.

    Raises:
        CaptureError: naming the rule that is broken. No argument of the user's is wrong: the passes of capture are.
    """
    try:
        verify(graph)
    except InputError as error:
        raise CaptureError(f"the captured {error} {REPORT}") from error
