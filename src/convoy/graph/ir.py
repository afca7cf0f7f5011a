"""The IR: Graph, Node, Value, Ref. Plain data, no torch; a graph is a list of nodes in executable order.

A net is a graph of values. A value is a graph input, a constant (a weight, whose tensor is stored beside the graph by name)
or the output of one node. A node names its operator: one of `LAYERS`, whose arguments Convoy interprets, or any ATen overload
by its own name (`aten.max_pool2d.default`), which it runs as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, Literal

from convoy.problem import TensorSpec

ValueKind = Literal["input", "constant", "node"]

CONVOLUTIONS: Final = ("conv2d", "conv3d")
"""Forward convolutions, of images and of volumes."""

VOLUME_GRADIENTS: Final = ("conv3d_dgrad", "conv3d_wgrad")
"""Those of a three-dimensional convolution's backward pass."""

GRADIENTS: Final = ("conv2d_dgrad", "conv2d_wgrad", *VOLUME_GRADIENTS)
"""Operators that are one direction of a convolution's backward pass."""

LAYERS: Final = (*CONVOLUTIONS, "linear", *GRADIENTS)
"""Operators whose arguments Convoy interprets."""

MAX_POOL_BACKWARD: Final = "aten.max_pool2d_with_indices_backward.default"
AVG_POOL_BACKWARD: Final = "aten.avg_pool2d_backward.default"
"""Backward passes of poolings, for which Convoy has a kernel."""

_TRANSPOSITIONS: Final = ("aten.t.default", "aten.transpose.int", "aten.permute.default")


@dataclass(frozen=True, slots=True)
class Ref:
    """A use of a value inside a node's arguments."""

    name: str


@dataclass(frozen=True, slots=True)
class Symbol:
    """An enumeration member inside a node's arguments: `dtype.fp32`, `layout.strided`, `device.inputs`, `memory_format.nhwc`."""

    text: str


Arg = None | bool | int | float | str | Ref | Symbol | tuple["Arg", ...]
"""What a node's argument may be; lists are tuples."""


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor that flows through the graph, or a constant."""

    name: str
    spec: TensorSpec
    kind: ValueKind


@dataclass(frozen=True, slots=True)
class Node:
    """One operation.

    Attributes:
        name: unique among nodes; by convention the first output's name.
        op: `conv2d` (x, weight, bias or None, stride, padding, dilation, groups: pairs of integers, then an integer),
            `linear` (x, weight, bias or None; the leading dimensions of x are rows),
            `conv2d_dgrad` (dy, weight, (h, w) of x, stride, padding, dilation, groups),
            `conv2d_wgrad` (x, dy, (r, s), stride, padding, dilation, groups),
            `conv3d`, `conv3d_dgrad` and `conv3d_wgrad` likewise with triples, or an ATen overload, `aten.NAME.OVERLOAD`.
        args: positional arguments.
        kwargs: keyword arguments, in order.
        outputs: names of the values that it makes, in order. An empty name is an output that nobody reads.
    """

    name: str
    op: str
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...] = ()
    outputs: tuple[str, ...] = ()

    def refs(self) -> Iterator[str]:
        """Names of the values that it reads, in argument order, repeats kept."""
        found: list[str] = []  # nested generators would take three times as long, and nets ask 100000 times
        _collect(self.args, found)
        for _, arg in self.kwargs:
            _collect((arg,), found)
        return iter(found)


def _collect(args: Iterable[Arg], found: list[str]) -> None:
    for arg in args:
        if isinstance(arg, Ref):
            found.append(arg.name)
        elif isinstance(arg, tuple):
            _collect(arg, found)


@dataclass(frozen=True, slots=True)
class Graph:
    """A net, or a subgraph of one.

    Attributes:
        inputs: names of the input values, in call order.
        outputs: names of the values returned, in order; a value may be returned twice.
        values: every value by name: inputs, constants, node outputs.
        nodes: in an order in which each only reads earlier values.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    values: dict[str, Value]
    nodes: tuple[Node, ...]
    _named: dict[str, Node] = field(default_factory=dict[str, Node], init=False, compare=False, repr=False)
    _producers: dict[str, Node] = field(default_factory=dict[str, Node], init=False, compare=False, repr=False)
    _users: dict[str, list[Node]] = field(default_factory=dict[str, list[Node]], init=False, compare=False, repr=False)
    has_volumes: bool = field(default=False, init=False, compare=False, repr=False)
    """Whether it has three-dimensional convolutions: its 5-D values then have a memory format."""

    def __post_init__(self) -> None:
        volumetric = any(node.op == "conv3d" or node.op in VOLUME_GRADIENTS for node in self.nodes)
        object.__setattr__(self, "has_volumes", volumetric)
        for node in self.nodes:
            self._named[node.name] = node
            self._producers.update((output, node) for output in node.outputs if output)
            for name in dict.fromkeys(node.refs()):
                self._users.setdefault(name, []).append(node)

    def producer(self, value: str) -> Node | None:
        """The node that makes a value; None for inputs and constants."""
        return self._producers.get(value)

    def users(self, value: str) -> list[Node]:
        """The nodes that read a value, in order, each once (being a graph output is no use)."""
        return self._users.get(value, [])

    def constants(self) -> list[Value]:
        """The constant values, in order of first mention."""
        return [v for v in self.values.values() if v.kind == "constant"]

    def has_layout(self, value: str) -> bool:
        """Whether a value has a memory format: it is 4-D, or 5-D in a graph with volumes."""
        rank = len(self.values[value].spec.shape)
        return rank == 4 or (rank == 5 and self.has_volumes)

    def is_transposed_view(self, value: str) -> bool:
        """Whether a value is a transposed matrix, of which PyTorch returns a view."""
        made = self.producer(value)
        return made is not None and made.op in _TRANSPOSITIONS and len(self.values[value].spec.shape) == 2

    def node(self, name: str) -> Node:
        """A node by name; KeyError where there is none."""
        return self._named[name]
