"""Parallel 1x1 convolutions of one input, as one product with all of their filters.

before: %a = conv2d(%x, %w1, %b1, ...); %p = aten.relu.default(%a)
        %b = conv2d(%x, %w2, %b2, ...); %q = aten.relu.default(%b)
-->
after:  merge(a+p+b+q)      p, q = relu of the channels of one convolution of x with the filters of w1 and w2

Inception's and GoogLeNet's modules begin like this: x is read once, and one kernel replaces three or four. Each result stays
a tensor of its own. A chain only reads x and its weights, and weights that are no constants, as in training, must not be made
by other layers: so no path leads from one chain to another, and the region is convex.
"""

from __future__ import annotations

from collections.abc import Sequence

from convoy.graph.ir import LAYERS, Graph, Node
from convoy.graph.layers import conv_problem
from convoy.regions.epilogue import LayerChain, chains
from convoy.regions.extract_subgraph import chains_region
from convoy.regions.region import Region

LAYOUT = "nhwc"
"""The memory format in which a pixel's channels are contiguous, so that all filters are rows of one matrix."""

MAX_MERGED = 4
"""Most convolutions in one region: the kernel has this many results."""

_DTYPES = ("fp16", "bf16")
"""Not fp32: a subgraph does not say how its products may be rounded."""


def merge_regions(graph: Graph, layouts: Sequence[str]) -> list[Region]:
    """One region for each value that several such convolutions read, with the longest chain of each that has no residual.

    A weight that several of them share is not merged: each needs its own.
    """
    if LAYOUT not in layouts:
        return []
    found: dict[str, list[LayerChain]] = {}
    for node in graph.nodes:
        if node.op == "conv2d" and _is_plain(graph, node):
            own = [chain for chain in chains(graph, node) if not chain.residual]
            if own and all(_is_given(graph, name) for name in list(node.refs())[1:]):
                found.setdefault(next(node.refs()), []).append(own[-1])
    regions: list[Region] = []
    for parallel in found.values():
        regions += [
            chains_region(graph, "merge", group[:MAX_MERGED], LAYOUT)
            for group in _mergeable(graph, parallel)
            if len(group) > 1
        ]
    return regions


def _is_plain(graph: Graph, node: Node) -> bool:
    """A 1x1 filter of stride 1 without padding or groups, in half precision."""
    problem = conv_problem(graph, node)
    plain = problem.is_pointwise and problem.stride_h == problem.stride_w == problem.groups == 1
    return plain and problem.x_dtype in _DTYPES and problem.x_dtype == problem.y_dtype == problem.weight_dtype


def _is_given(graph: Graph, value: str) -> bool:
    """Whether no layer contributes to a value: a constant, an input, or casts and masks of them."""
    waiting, seen = [value], {value}
    while waiting:
        maker = graph.producer(waiting.pop())
        if maker is None:
            continue
        if maker.op in LAYERS:
            return False
        unseen = [name for name in maker.refs() if name not in seen]
        seen.update(unseen)
        waiting += unseen
    return True


def _mergeable(graph: Graph, parallel: Sequence[LayerChain]) -> list[list[LayerChain]]:
    """Chains that one launch can compute: with equal activations, and with biases and constant weights in all or in none."""
    groups: dict[tuple[str, bool, bool], list[LayerChain]] = {}
    for chain in parallel:
        groups.setdefault((chain.activation, chain.epilogue().bias, chain.has_dynamic_weight(graph)), []).append(chain)
    return list(groups.values())
