"""Propose 1x1 convolutions with the depthwise convolution behind them, for an engine that computes both as one kernel.

before: %a = conv2d(%x, %w1, %b1, ...); %p = aten.silu.default(%a)           1x1, to more channels as a rule
        %b = conv2d(%p, %w2, %b2, ...); %q = aten.silu.default(%b)           one filter a channel, 3x3 or 5x5, stride 1 or 2
-->
after:  expanded(a+p+b+q)

They begin an inverted residual block. Where a gate stands between the depthwise and the last 1x1 convolution, as in EfficientNet
and MobileNetV3, no kernel can take all three: the gate needs the whole image. The value between the two has one reader and is not
returned, so no path leaves the region and comes back: it is convex. The result may have any readers.
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
"""The memory format in which a pixel's channels are contiguous."""

_DTYPES: Final = ("fp16", "bf16")
"""Not fp32: a subgraph does not say how its products may be rounded."""


def expanded_regions(graph: Graph, layouts: Sequence[str]) -> list[Region]:
    """One region for each such pair of layers with constant weights in half precision."""
    if LAYOUT not in layouts:
        return []
    found = (expanded_chains(graph, node) for node in graph.nodes if is_pointwise(graph, node))
    return [chains_region(graph, "expanded", group, LAYOUT) for group in found if group]


def expanded_chains(graph: Graph, first: Node) -> list[LayerChain]:
    """The chains of a 1x1 convolution and of the depthwise one that alone reads it; none if others do."""
    expand = _plain(graph, first)
    second = only_reader(graph, expand.result) if expand else None
    if expand is None or second is None or not _is_depthwise(graph, second):
        return []
    filtered = _plain(graph, second)
    return [expand, filtered] if filtered else []


def is_pointwise(graph: Graph, node: Node) -> bool:
    """Whether a node is a 1x1 convolution of stride 1 of all channels, in half precision with constant weights."""
    problem = _layer(graph, node)
    if problem is None or not problem.is_pointwise:
        return False
    return problem.groups == problem.stride_h == problem.stride_w == 1


def _plain(graph: Graph, node: Node) -> LayerChain | None:
    """The longest chain of a layer without a residual."""
    found = [chain for chain in chains(graph, node) if not chain.residual]
    return found[-1] if found else None


def _layer(graph: Graph, node: Node) -> ConvProblem | None:
    """A convolution in half precision whose other operands are constants."""
    if node.op != "conv2d" or any(graph.values[name].kind != "constant" for name in list(node.refs())[1:]):
        return None
    problem: ConvProblem = conv_problem(graph, node)
    same = problem.x_dtype == problem.y_dtype == problem.weight_dtype
    return problem if same and problem.x_dtype in _DTYPES and problem.dilation_h == problem.dilation_w == 1 else None


def _is_depthwise(graph: Graph, node: Node) -> bool:
    """Whether a node is a 3x3 or 5x5 convolution of one filter a channel, padded to its input's size, of stride 1 or 2."""
    problem = _layer(graph, node)
    if problem is None or not 1 < problem.c == problem.k == problem.groups:
        return False
    square = problem.r == problem.s in (3, 5) and problem.pad_h == problem.pad_w == problem.r // 2
    return square and problem.stride_h == problem.stride_w in (1, 2)
