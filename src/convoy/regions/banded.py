"""A depthwise convolution with the convolutions before and after it, for an engine that computes bands of rows.

before: %a = conv2d(%x, %w1, %b1, ...); %p = aten.relu6.default(%a)          1x1 to more channels, or any other filter
        %b = conv2d(%p, %w2, %b2, ...); %q = aten.relu6.default(%b)          one filter a channel
        %c = conv2d(%q, %w3, %b3, ...); %y = aten.add.Tensor(%c, %x)         1x1 to fewer
-->
after:  banded(a+p+b+q+c+y)

MobileNetV2's blocks have this form (Sandler et al., 2018): the values between the three convolutions have six times the
channels of input and output. Of other blocks, two convolutions are taken. A value inside has one reader and is not returned,
so the region is convex. If all values inside are small, a cache holds them anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from convoy.graph.ir import Graph, Node
from convoy.graph.layers import conv_problem
from convoy.problem import ConvProblem
from convoy.regions.epilogue import LayerChain, chains, only_reader
from convoy.regions.extract_subgraph import chains_region
from convoy.regions.region import Region

LAYOUT: Final = "nhwc"
"""The memory format in which an image's rows are contiguous."""


def banded_regions(graph: Graph, layouts: Sequence[str], least_bytes: int) -> list[Region]:
    """One region for each depthwise convolution with such a neighbour, with both neighbours if it has two.

    Args:
        graph: the net.
        layouts: memory formats that are offered.
        least_bytes: least size of the largest value inside.
    """
    if LAYOUT not in layouts:
        return []
    made = {
        chain.result: chain
        for node in graph.nodes
        if _is_layer(graph, node) and conv_problem(graph, node).groups == 1
        for chain in chains(graph, node)
        if not chain.residual
    }
    found = [
        _around(graph, node, made) for node in graph.nodes if _is_layer(graph, node) and _is_depthwise(graph, node)
    ]
    return [
        chains_region(graph, "banded", group, LAYOUT)
        for group in found
        if len(group) > 1 and _inside(graph, group) >= least_bytes
    ]


def _is_layer(graph: Graph, node: Node) -> bool:
    """Whether a node is a convolution in fp32 with a constant weight."""
    if node.op != "conv2d" or any(graph.values[name].kind != "constant" for name in list(node.refs())[1:]):
        return False
    return conv_problem(graph, node).x_dtype == conv_problem(graph, node).y_dtype == "fp32"


def _is_depthwise(graph: Graph, node: Node) -> bool:
    problem: ConvProblem = conv_problem(graph, node)
    return 1 < problem.c == problem.k == problem.groups


def _around(graph: Graph, node: Node, made: dict[str, LayerChain]) -> list[LayerChain]:
    """The chains before, of and after a depthwise convolution."""
    own = [chain for chain in chains(graph, node) if not chain.residual]
    if not own:
        return []
    x = next(node.refs())
    before = [made[x]] if x in made and only_reader(graph, x) == node else []
    reader = only_reader(graph, own[-1].result)
    after = [chains(graph, reader)[-1]] if reader is not None and _narrows(graph, reader, own[-1].result) else []
    return [*before, own[-1], *after]


def _narrows(graph: Graph, node: Node, value: str) -> bool:
    """Whether a node is a 1x1 convolution of a value."""
    if not _is_layer(graph, node) or next(node.refs()) != value:
        return False
    problem = conv_problem(graph, node)
    return problem.is_pointwise and problem.groups == 1


def _inside(graph: Graph, group: Sequence[LayerChain]) -> int:
    """Bytes of the largest value that exists only inside the region."""
    return max(graph.values[chain.result].spec.size_bytes for chain in group[:-1])
