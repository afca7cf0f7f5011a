"""Groups of nodes that an engine says it computes together (`Engine.fusions`), as regions.

before: %h = linear(%x, %w, None); %y = linear(%h, %v, None)          an engine names (h, y)
-->
after:  fused(h+y)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from convoy.errors import InputError
from convoy.graph.ir import Graph
from convoy.regions.extract_subgraph import subgraph_region
from convoy.regions.region import Region


def fused_regions(graph: Graph, groups: Iterable[Sequence[str]], layouts: Sequence[str], engine: str) -> list[Region]:
    """One region for each distinct group.

    Args:
        graph: the net.
        groups: names of nodes.
        layouts: memory formats to offer.
        engine: id of the engine that names the groups, for errors.

    Raises:
        InputError: a group has fewer than two nodes, names a node that the graph lacks, or cannot run as one step.
    """
    order = {node.name: place for place, node in enumerate(graph.nodes)}
    found: dict[tuple[str, ...], None] = {}
    for group in groups:
        unknown = [name for name in group if name not in order]
        if unknown or len(set(group)) < 2:
            raise InputError(f"fusions of engine {engine}", tuple(group), "two or more names of the graph's nodes")
        names = tuple(sorted(set(group), key=order.__getitem__))
        if between := _node_between(graph, names):
            expected = "nodes without a path between them that leaves the group"
            raise InputError(f"fusions of engine {engine}", names, expected, f"One runs through {between}.")
        found[names] = None
    return [subgraph_region(graph, "fused", names, layouts) for names in found]


def _node_between(graph: Graph, names: Sequence[str]) -> str:
    """A node outside a group that reads from it, directly or not, and that a node of the group needs; empty: there is none."""
    inside, behind = set(names), set[str]()
    for node in graph.nodes:
        makers = {maker.name for name in node.refs() if (maker := graph.producer(name)) is not None}
        if node.name in inside:
            if passed := sorted(makers & behind):
                return passed[0]
        elif makers & (inside | behind):
            behind.add(node.name)
    return ""
