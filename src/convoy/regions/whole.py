"""The whole graph as one region, and parts of it between points that every path passes: for a compiler of whole nets.

before: %a = conv2d(%x, ...); %n = aten.native_layer_norm(%a); ...; %y = aten.add.Tensor(%l, %x)     any number of nodes
-->
after:  whole(a+n+...+y)        all nodes, or those between two such points

A point lies behind a node if a single value leads from the nodes up to it to the later ones, and that value has several
readers, as the output of a residual block has. Nodes between two points are convex: a path that leaves them cannot return. A part
is proposed only if it has nodes that no epilogue of a layer computes, because for the others Convoy's kernels fuse as much.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Final

from convoy.errors import InputError
from convoy.graph.ir import CONVOLUTIONS, GRADIENTS, LAYERS, Graph, Node
from convoy.graph.layers import conv3d_problem, conv_problem
from convoy.graph.randomness import draws_random, is_recurrent
from convoy.regions.activation import activation_of
from convoy.regions.extract_subgraph import subgraph_region
from convoy.regions.region import Region

PATTERN: Final = "whole"

LEAST_FLOPS: Final = 5_000_000
"""Operations of the smallest net for which whole regions are proposed: a smaller one runs for less than its compiler's seconds
are worth."""

LEAST_LAYERS: Final = 2
"""Layers of the smallest region: one layer alone is a region of its own."""

_PRODUCTS: Final = ("conv", "linear", "mm")
"""Parts of the names of ATen's operators that are layers too, such as `aten.linear.default` of a 4-D value."""


@dataclass(frozen=True, slots=True)
class WholeScope:
    """Which regions are proposed.

    Attributes:
        parts: most different parts besides the whole graph.
        stages: whether consecutive parts with results of one shape are also proposed together.
    """

    parts: int = 0
    stages: bool = False


def whole_regions(graph: Graph, layouts: Sequence[str], scope: WholeScope) -> list[Region]:
    """The region of all nodes in every memory format, and regions of parts in the best one, `nhwc`.

    None for a graph of a training step, one that draws random numbers, and one that is small.

    Args:
        graph: the net.
        layouts: memory formats to offer.
        scope: how many parts.
    """
    if not _is_plain(graph) or _flops(graph.nodes, graph) < LEAST_FLOPS:
        return []
    names = tuple(node.name for node in graph.nodes)
    found = [subgraph_region(graph, PATTERN, names, layouts)]
    best = ("nhwc",) if "nhwc" in layouts else tuple(layouts[:1])
    same: dict[str, list[Region]] = {}
    for nodes in _parts(graph, scope) if scope.parts else ():
        if len(nodes) < len(names):
            region = subgraph_region(graph, PATTERN, tuple(node.name for node in nodes), best)
            same.setdefault(region.problems[0].key, []).append(region)
    work = {key: sum(_flops([graph.node(n) for n in r.nodes], graph) for r in made) for key, made in same.items()}
    largest = sorted(same, key=lambda key: -work[key])[: scope.parts]
    return found + [region for key, made in same.items() if key in largest for region in made]


def _is_plain(graph: Graph) -> bool:
    """Whether a graph computes an inference: several layers, whose weights are constants."""
    return not why_not_plain(graph) and layers_of(graph.nodes) >= LEAST_LAYERS


def why_not_plain(graph: Graph) -> str:
    """Why a graph cannot be a region as a whole: it is part of a training step, or draws random numbers. Empty if it can."""
    for node in graph.nodes:
        if node.op in GRADIENTS or "backward" in node.op:
            return f"compiles inference, got {node.op}"
        if node.op in LAYERS and any(graph.values[name].kind != "constant" for name in list(node.refs())[1:]):
            return f"needs weights that are constants, got a computed one in {node.op}"
        if draws_random(node):
            return f"draws different random numbers than PyTorch for the same seed, got {node.op}"
        if is_recurrent(node):
            return f"would compile each time step of a recurrent layer, got {node.op}"
    return ""


def is_layer(node: Node) -> bool:
    """Whether a node is a sum of products: one of `LAYERS`, or an operator of ATen's such as `aten.linear.default`."""
    return node.op in LAYERS or any(part in node.op.split(".")[1] for part in _PRODUCTS if "." in node.op)


def layers_of(nodes: Sequence[Node]) -> int:
    """How many of some nodes are layers."""
    return sum(map(is_layer, nodes))


def _parts(graph: Graph, scope: WholeScope) -> list[list[Node]]:
    """Nodes between two points, each with several layers and something that epilogues cannot compute."""
    points = [0, *_points(graph), len(graph.nodes)]
    blocks = [list(graph.nodes[a:b]) for a, b in pairwise(points) if b > a]
    found = [block for block in blocks if _is_worthwhile(block)]
    if scope.stages:
        runs = [list(run) for _, run in groupby(blocks, key=lambda block: _result_shape(graph, block))]
        stages = [[node for block in run for node in block] for run in runs if len(run) > 1]
        found += [stage for stage in stages if _is_worthwhile(stage)]
    return found


def _points(graph: Graph) -> list[int]:
    """Indices of nodes before which a single value with several readers is all that later nodes read of earlier ones."""
    last = {name: index for index, node in enumerate(graph.nodes) for name in node.refs()}
    alive = {name for name in graph.inputs if name in last}
    found: list[int] = []
    for index, node in enumerate(graph.nodes[:-1]):
        alive.update(output for output in node.outputs if output in last)
        alive = {name for name in alive if last[name] > index}
        if len(alive) == 1 and len(graph.users(next(iter(alive)))) > 1:
            found.append(index + 1)
    return found


def _result_shape(graph: Graph, block: Sequence[Node]) -> tuple[int, ...]:
    outputs = [output for output in block[-1].outputs if output]
    return tuple(graph.values[outputs[0]].spec.shape) if outputs else ()


def _is_worthwhile(nodes: Sequence[Node]) -> bool:
    others = (node for node in nodes if not is_layer(node) and node.op != "aten.add.Tensor")
    return layers_of(nodes) >= LEAST_LAYERS and not all(map(activation_of, others))


def _flops(nodes: Sequence[Node], graph: Graph) -> int:
    """Operations of the convolutions and linear layers among some nodes."""
    total = 0
    for node in nodes:
        names = list(node.refs())
        if node.op in CONVOLUTIONS:
            with suppress(InputError):  # a convolution that no problem describes
                total += (conv_problem if node.op == "conv2d" else conv3d_problem)(graph, node).flops
        elif len(names) > 1 and "linear" in node.op:
            total += 2 * graph.values[node.outputs[0]].spec.elements * graph.values[names[1]].spec.shape[-1]
    return total
