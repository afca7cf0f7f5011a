"""Captured: a net as a graph, with its constants and the structure of its call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from convoy.errors import InputError
from convoy.graph.ir import Graph


@dataclass(frozen=True, slots=True)
class Captured:
    """What capture found.

    Attributes:
        graph: the net.
        constants: tensors of the graph's constants, by value name; detached, as they were at capture or derived then.
        notes: what the user should know, one line each.
        in_spec: structure of (args, kwargs).
        tensor_leaves: which leaves of the arguments are the graph's inputs, in order.
        out_spec: structure of the result.
        out_leaves: for each leaf of the result the index of a graph output, or (None, constant).
    """

    graph: Graph
    constants: dict[str, torch.Tensor]
    notes: tuple[str, ...]
    in_spec: Any
    tensor_leaves: tuple[int, ...]
    out_spec: Any
    out_leaves: tuple[int | tuple[None, Any], ...]

    def flatten_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> list[torch.Tensor]:
        """The graph's inputs, in order, from a call's arguments.

        Raises:
            InputError: arguments of another structure than at capture.
        """
        if not kwargs and len(args) == len(self.tensor_leaves) and all(isinstance(a, torch.Tensor) for a in args):
            return list(args)
        leaves, spec = pytree.tree_flatten((args, kwargs or {}))
        if spec != self.in_spec:
            raise InputError("args", spec, f"arguments of the structure that was captured, {self.in_spec}")
        return [leaves[index] for index in self.tensor_leaves]

    def unflatten_outputs(self, outputs: list[torch.Tensor]) -> Any:
        """The model's result from the graph's outputs."""
        leaves = [outputs[leaf] if isinstance(leaf, int) else leaf[1] for leaf in self.out_leaves]
        return pytree.tree_unflatten(leaves, self.out_spec)
