"""How many zeros a net's convolutions are given: counted on the user's own inputs, by running the graph once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from convoy.engines.interpret import compile_graph
from convoy.engines.zeros import quantise
from convoy.graph.ir import Graph, Node, Ref, Value
from convoy.graph.rebuild import rebuild
from convoy.problem import TensorSpec


def convolution_inputs(graph: Graph) -> dict[str, str]:
    """The value that each `conv2d` node reads, by the node's name, in graph order."""
    return {node.name: next(iter(node.refs())) for node in graph.nodes if node.op == "conv2d"}


@torch.no_grad()
def zero_shares(
    graph: Graph, constants: Mapping[str, torch.Tensor], inputs: Sequence[torch.Tensor]
) -> dict[str, float]:
    """The share of exact zeros (-0.0 is one) in every value that a convolution reads, 0..1, by the value's name.

    Counting joins the graph as operators, so that no more values are held at once than in an ordinary run.

    Args:
        graph: an inference graph.
        constants: its constants by name.
        inputs: the user's own inputs; what random ones give is not what real ones do.
    """
    names = [name for name in dict.fromkeys(convolution_inputs(graph).values()) if graph.values[name].spec.elements]
    counts = {name: f"nonzero.{index}.{name}" for index, name in enumerate(names)}
    values = dict(graph.values)
    nodes = list(graph.nodes)
    for name, count in counts.items():
        values[count] = Value(count, TensorSpec((), "i64"), "node")
        made = graph.producer(name)
        at = 0 if made is None else nodes.index(made) + 1
        nodes.insert(at, Node(count, "aten.count_nonzero.default", (Ref(name),), (), (count,)))
    probe = rebuild(graph.inputs, tuple(counts.values()), values, nodes)
    found = compile_graph(probe)(inputs, [constants[value.name] for value in probe.constants()])
    return {name: 1 - int(count) / graph.values[name].spec.elements for name, count in zip(names, found, strict=True)}


def quantised(shares: Mapping[str, float]) -> dict[str, int]:
    """Shares as the percentages that engines are measured for."""
    return {name: quantise(share) for name, share in shares.items()}
