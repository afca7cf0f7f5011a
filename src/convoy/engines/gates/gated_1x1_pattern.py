"""A squeeze-and-excitation block and the 1x1 convolution behind it as a subgraph: which nodes it consists of, and its sizes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from convoy.engines.gates.squeeze_excitation_pattern import (
    BlockMatch,
    SqueezeExcitation,
    layer_1x1,
    match_block,
    with_tail,
)
from convoy.engines.subgraph import parse_subgraph
from convoy.graph.ir import Graph, Node
from convoy.problem import SubgraphProblem


@dataclass(frozen=True, slots=True)
class Gated1x1:
    """The computation of a subgraph: y = relu(w · (x · gate of x) + b + residual), by pixel.

    Attributes:
        block: the squeeze-and-excitation block, without a residual and a ReLU of its own.
        filters: channels of y.
        bias: whether the convolution has one.
        residual: whether a second input of y's shape is added.
        relu: whether a ReLU follows.
    """

    block: SqueezeExcitation
    filters: int
    bias: bool
    residual: bool
    relu: bool

    @staticmethod
    def of(problem: SubgraphProblem) -> Gated1x1 | None:
        """The computation of a subgraph; None if it is another one, or has other nodes besides."""
        graph = parse_subgraph(problem.text)
        found = next((match for node in graph.nodes if (match := _match(graph, node)) is not None), None)
        if found is None:
            return None
        gated, weight, bias, whole = found
        if graph.outputs != (whole.result,) or {node.name for node in graph.nodes} != set(whole.nodes):
            return None
        wanted = [whole.x, whole.residual] if whole.residual else [whole.x]
        pairs = ((gated.weights[0], gated.biases[0]), (gated.weights[1], gated.biases[1]), (weight, bias))
        constants = [name for pair in pairs for name in pair if name]
        if [*graph.inputs] != wanted or [value.name for value in graph.constants()] != constants:
            return None
        block = SqueezeExcitation.of_match(graph, gated)
        filters = graph.values[weight].spec.shape[0]
        return Gated1x1(block, filters, bool(bias), bool(whole.residual), whole.relu)


def gated_1x1s(graph: Graph) -> Iterator[Sequence[str]]:
    """The nodes of each block with its convolution, alone and with the residual and the ReLU behind it where they are there."""
    for node in graph.nodes:
        if (found := _match(graph, node, tail=False)) is None:
            continue
        yield found[3].nodes
        whole = _match(graph, node)
        if whole is not None and whole[3] != found[3]:
            yield whole[3].nodes


def _match(graph: Graph, pool: Node, *, tail: bool = True) -> tuple[BlockMatch, str, str, BlockMatch] | None:
    """The block that begins with a mean, and the 1x1 convolution that reads its product; None if there is none.

    Returns:
        The block; names of the convolution's weight and bias; and block and convolution together, with `tail` also the sum and
        the ReLU behind them.
    """
    gated = match_block(graph, pool, tail=False)
    layer = layer_1x1(graph, gated.result) if gated is not None else None
    if gated is None or layer is None:
        return None
    node, weight, bias = layer
    x, y = graph.values[gated.x].spec, graph.values[node.outputs[0]].spec
    if tuple(node.args[3]) != (1, 1) or y.dtype != x.dtype or y.shape[2:] != x.shape[2:]:  # type: ignore[arg-type] - a pair of integers
        return None
    whole = replace(gated, nodes=(*gated.nodes, node.name), result=node.outputs[0])
    return gated, weight, bias, with_tail(graph, whole) if tail else whole
