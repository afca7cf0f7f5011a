"""A bottleneck of a residual net: three convolutions with what follows each, for an engine that computes them as one kernel.

before: %a = conv2d(%x, %w1, %b1, ...); %p = aten.relu.default(%a)           1x1
        %b = conv2d(%p, %w2, %b2, ...); %q = aten.relu.default(%b)           3x3, stride 1
        %c = conv2d(%q, %w3, %b3, ...); %d = aten.add.Tensor(%c, %x); %y = aten.relu.default(%d)      1x1
-->
after:  block(a+p+b+q+c+d+y)

The values between the convolutions need not go to memory (He et al., 2016, call these three layers a bottleneck). The residual
may be x or another value, such as a projection of x. A value inside has one reader and is not returned, so no path leaves the
region and comes back: it is convex.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from convoy.graph.ir import Graph, Node
from convoy.graph.layers import conv_problem
from convoy.regions.epilogue import LayerChain, chains, only_reader
from convoy.regions.extract_subgraph import chains_region
from convoy.regions.region import Region

LAYOUT: Final = "nhwc"
"""The memory format in which a pixel's channels are contiguous."""

_DTYPES: Final = ("fp16", "bf16")
"""Not fp32: a subgraph does not say how its products may be rounded."""


def block_regions(graph: Graph, layouts: Sequence[str]) -> list[Region]:
    """One region for each bottleneck of stride 1 with constant weights in half precision."""
    if LAYOUT not in layouts:
        return []
    found = (_bottleneck(graph, node) for node in graph.nodes if _is_layer(graph, node, 1))
    return [chains_region(graph, "block", group, LAYOUT) for group in found if group]


def _bottleneck(graph: Graph, first: Node) -> list[LayerChain]:
    """The three chains that begin at a 1x1 convolution; none if others follow it."""
    group: list[LayerChain] = []
    node: Node | None = first
    for side in (1, 3, 1):
        if node is None or not _is_layer(graph, node, side):
            return []
        own = chains(graph, node)
        if side == 3 or not group:  # a residual inside is not part of a bottleneck
            own = [chain for chain in own if not chain.residual]
        if not own or (group and next(node.refs()) != group[-1].result):
            return []
        group.append(own[-1])
        node = only_reader(graph, own[-1].result)
    return group


def _is_layer(graph: Graph, node: Node, side: int) -> bool:
    """Whether a node is such a convolution of stride 1 that keeps its input's height and width."""
    if node.op != "conv2d" or any(graph.values[name].kind != "constant" for name in list(node.refs())[1:]):
        return False
    problem = conv_problem(graph, node)
    plain = problem.stride_h == problem.stride_w == problem.dilation_h == problem.dilation_w == problem.groups == 1
    square = problem.r == problem.s == side and problem.pad_h == problem.pad_w == side // 2
    return (
        plain and square and problem.x_dtype in _DTYPES and problem.x_dtype == problem.y_dtype == problem.weight_dtype
    )
