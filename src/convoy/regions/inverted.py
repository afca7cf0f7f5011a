"""Propose inverted residual blocks, three convolutions with their activations, for an engine that computes one as one kernel.

before: %a = conv2d(%x, %w1, %b1, ...); %p = aten.relu6.default(%a)          1x1 to more channels
        %b = conv2d(%p, %w2, %b2, ...); %q = aten.relu6.default(%b)          one filter a channel, 3x3 or 5x5, stride 1 or 2
        %c = conv2d(%q, %w3, %b3, ...); %y = aten.add.Tensor(%c, %x)         1x1 to fewer
-->
after:  inverted(a+p+b+q+c+y)

The values between the convolutions, six times as many channels as outside in MobileNetV2 (Sandler et al., 2018), need not go to
memory. A residual other than x, and what follows the sum, stay outside. A value inside has one reader and is not returned, so no
path leaves the region and comes back: it is convex.
"""

from __future__ import annotations

from collections.abc import Sequence

from convoy.graph.ir import Graph, Node
from convoy.graph.layers import conv_problem
from convoy.regions.epilogue import LayerChain, chains, only_reader
from convoy.regions.expanded import LAYOUT, expanded_chains, is_pointwise
from convoy.regions.extract_subgraph import chains_region
from convoy.regions.region import Region


def inverted_regions(graph: Graph, layouts: Sequence[str]) -> list[Region]:
    """One region for each inverted residual block with constant weights in half precision."""
    if LAYOUT not in layouts:
        return []
    found = (_block(graph, node) for node in graph.nodes if is_pointwise(graph, node))
    return [chains_region(graph, "inverted", group, LAYOUT) for group in found if group]


def _block(graph: Graph, first: Node) -> list[LayerChain]:
    """The three chains that begin at a 1x1 convolution; none if others follow it."""
    before = expanded_chains(graph, first)
    last = only_reader(graph, before[1].result) if before else None
    if last is None or not is_pointwise(graph, last) or next(last.refs()) != before[1].result:
        return []
    added = ("", next(first.refs())) if conv_problem(graph, before[1].nodes[0]).stride_h == 1 else ("",)
    ends = [chain for chain in chains(graph, last) if chain.activation == "none" and chain.residual in added]
    return [*before, ends[-1]] if ends else []
