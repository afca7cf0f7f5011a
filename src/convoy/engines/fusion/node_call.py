"""The arguments of one operator of a graph, by name, with the values that it reads as `Tensor`s."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from convoy.engines.fusion.tensors import NotFusibleError, Tensor, broadcast
from convoy.graph.ir import Arg, Graph, Node, Ref
from convoy.problem import TensorSpec

NEEDED: Final = "(needed)"
"""In place of a default, for arguments that have none."""


@dataclass(frozen=True, slots=True)
class NodeCall:
    """One node and the values that it reads.

    Attributes:
        graph: its graph.
        node: the node.
        known: the values before it, by name.
    """

    graph: Graph
    node: Node
    known: Mapping[str, Tensor]

    @property
    def operator(self) -> str:
        """`relu` of `aten.relu.default`."""
        return self.node.op.split(".")[1] if "." in self.node.op else self.node.op

    @property
    def overload(self) -> str:
        """`default` of `aten.relu.default`."""
        return self.node.op.split(".")[2] if "." in self.node.op else ""

    @property
    def spec(self) -> TensorSpec:
        """Of the first result."""
        return self.result_spec(0)

    def result_spec(self, place: int) -> TensorSpec:
        """Of one result."""
        return self.graph.values[self.node.outputs[place]].spec

    def read(self, **defaults: Arg) -> list[Arg]:
        """Arguments in the order of the names, which is the operator's, with defaults for those that are not given.

        Raises:
            NotFusibleError: an argument without a name.
        """
        names = list(defaults)
        given = dict(zip(names, self.node.args, strict=False)) | dict(self.node.kwargs)
        more = [name for name in given if name not in defaults]
        if len(self.node.args) > len(names) or more:
            raise NotFusibleError(f"does not know all arguments of {self.node.op}")
        found = [given.get(name, default) for name, default in defaults.items()]
        if any(value == NEEDED for value in found):
            raise NotFusibleError(f"does not know this form of {self.node.op}")
        return found

    def tensor(self, arg: Arg) -> Tensor:
        """The value that an argument is.

        Raises:
            NotFusibleError: it is none.
        """
        if not isinstance(arg, Ref):
            raise NotFusibleError(f"needs a tensor as argument of {self.node.op}, got {arg}")
        return self.known[arg.name]

    def fitted(self, arg: Arg) -> Tensor:
        """The value, broadcast to the result's shape."""
        return broadcast(self.tensor(arg), self.spec.shape)

    def dtype(self, arg: Arg) -> str:
        """The dtype of the value that an argument is."""
        assert isinstance(arg, Ref)
        return self.graph.values[arg.name].spec.dtype


def numeric(arg: Arg) -> float:
    """A number, as fp32 holds it.

    Raises:
        NotFusibleError: it is none, or too large for fp32.
    """
    if not isinstance(arg, int | float):
        raise NotFusibleError(f"needs a number, got {arg}")
    try:
        return struct.unpack("<f", struct.pack("<f", float(arg)))[0]
    except OverflowError as error:
        raise NotFusibleError(f"needs a number that fp32 can hold, got {arg}") from error


def integers(arg: Arg) -> tuple[int, ...]:
    """A list of integers; a single one as a list.

    Raises:
        NotFusibleError: it is anything else.
    """
    items = arg if isinstance(arg, tuple) else (arg,)
    if not all(isinstance(item, int) and not isinstance(item, bool) for item in items):
        raise NotFusibleError(f"needs integers, got {arg}")
    return tuple(item for item in items if isinstance(item, int))


def integer(arg: Arg) -> int:
    """A single integer."""
    (found,) = integers(arg) if not isinstance(arg, tuple) or len(arg) == 1 else (0,) * 2
    return found


def dimension(arg: Arg, rank: int) -> int:
    """A dimension, counted from the front."""
    found = integer(arg)
    return found + rank if found < 0 else found
