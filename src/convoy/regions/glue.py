"""What lies between the layers, several nodes together: one kernel instead of one for each, where a compiler can.

before: %r = aten.relu.default(%y)                      y made by a convolution
        %p = aten.max_pool2d.default(%r, (3, 3))
        %c = aten.cat.default((%p, %z), 1)
-->
after:  glue(r+p+c)
        glue(p+c)         for the cover in which the convolution's epilogue takes r

A node that an engine has a kernel for (`SEPARATE_OPS`) is a group of its own, with the casts of what it reads, and left out of a
further variant. So is a pooling, with what flattens it for a linear layer, where there is an engine for that.

Nodes are grouped by depth, the number of layers on the longest way to them (`LAYERS`, and nodes that draw random numbers),
and connected ones of one depth make a group. (Layers that no glue comes before are not counted: they are in nobody's way.) A cast
that its only reader's kernel can do has that reader's depth.
A group is convex: depth never falls along a way, so a way from one of its nodes to another runs at one depth; a layer on it
would have raised the depth, so it runs through glue of that depth, which is connected to both ends and therefore in the
group. The same holds of what is left when epilogues take some nodes: those count as layers do.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Final

from convoy.graph.ir import AVG_POOL_BACKWARD, LAYERS, MAX_POOL_BACKWARD, Graph, Node
from convoy.graph.randomness import draws_random
from convoy.regions.casts import is_cast
from convoy.regions.epilogue import only_reader
from convoy.regions.extract_subgraph import subgraph_region
from convoy.regions.pool import flattens, pool_of
from convoy.regions.region import Region

SEPARATE_OPS: Final = (MAX_POOL_BACKWARD, AVG_POOL_BACKWARD)
"""Operators that an engine has a kernel for (`triton.pool_backward`), which a group would do worse. The first one's reads its
indices as they are kept: the cast that widens them is its own."""


def glue_regions(
    graph: Graph,
    epilogues: set[str],
    layouts: Sequence[str],
    norms: Collection[str] = (),
    *,
    pools: bool = False,
) -> list[Region]:
    """Groups of several nodes, and what is left of each where epilogues take all that they can, and where nodes stay alone.

    These variants of a group and no more, for each is a kernel to compile: a cover in which some epilogues take their nodes
    and others do not finds the rest as single nodes.

    Args:
        graph: the net.
        epilogues: names of all nodes that some layer's epilogue could take.
        layouts: memory formats to offer.
        norms: names of the nodes that batch norms could take along, themselves included.
        pools: whether an engine does poolings by themselves.
    """
    layers = [node.name for node in graph.nodes if node.op in LAYERS or draws_random(node)]
    found: dict[tuple[str, ...], None] = {}
    for names in connected_groups(graph, graph.nodes, layers):
        group = [graph.node(name) for name in names]
        pairs = [_with_cast(graph, node) for node in group if node.op in SEPARATE_OPS]
        pooled = [_with_view(graph, node) for node in group if pools and pool_of(graph, node)]
        alone = {name for pair in pairs for name in pair}
        ends, normed = set(names) & epilogues, set(names) & {*norms}
        for taken in ((), ends, alone, normed, alone | normed, {name for pair in pooled for name in pair} | ends):
            found.update(dict.fromkeys(connected_groups(graph, group, taken)))
        found.update(dict.fromkeys((*pairs, *pooled)))
    return [subgraph_region(graph, "glue", nodes, layouts) for nodes in found if len(nodes) > 1]


def _with_cast(graph: Graph, node: Node) -> tuple[str, ...]:
    """A node, with the casts that widen what it reads for it alone where its kernel reads them as they are."""
    makers = [graph.node(name) for name in dict.fromkeys(_makers(graph, node))]
    return (*(one.name for one in makers if _late_reader(graph, one) == node.name), node.name)


def _with_view(graph: Graph, node: Node) -> tuple[str, ...]:
    """A pooling, with its only reader where that makes it flat."""
    reader = only_reader(graph, node.outputs[0])
    return (node.name,) if reader is None or not flattens(graph, reader) else (node.name, reader.name)


def connected_groups(graph: Graph, nodes: Sequence[Node], barriers: Collection[str]) -> list[tuple[str, ...]]:
    """Connected nodes of one depth, each group in graph order.

    Args:
        graph: the net.
        nodes: a convex set of nodes in graph order: all of the graph's, or a group's.
        barriers: names of the nodes that are in no group, and that depth counts.
    """
    depth = depths(graph, nodes, barriers)
    root = {node.name: node.name for node in nodes if node.name not in barriers}

    def find(name: str) -> str:
        while root[name] != name:
            root[name] = root[root[name]]
            name = root[name]
        return name

    for node in nodes:
        for maker in _makers(graph, node):
            if node.name in root and maker in root and depth[maker] == depth[node.name]:
                root[find(node.name)] = find(maker)
    found: dict[str, list[str]] = {}
    for name in root:
        found.setdefault(find(name), []).append(name)
    return [tuple(names) for names in found.values()]


def depths(graph: Graph, nodes: Sequence[Node], barriers: Collection[str]) -> dict[str, int]:
    """For each node the barriers on the longest way to it, itself included, from a node that is no barrier."""
    found: dict[str, int] = {}
    behind: set[str] = set()
    for node in nodes:
        makers = [maker for maker in _makers(graph, node) if maker in found]
        is_barrier = node.name in barriers
        if not is_barrier or any(maker in behind for maker in makers):
            behind.add(node.name)
        before = max((found[maker] for maker in makers), default=0)
        found[node.name] = before + (is_barrier and node.name in behind)
    for node in nodes:
        late = _late_reader(graph, node)
        if late in found and node.name not in barriers:
            found[node.name] = found[late]
    return found


def _late_reader(graph: Graph, node: Node) -> str:
    """The one node that reads a cast, where a kernel of that node's own does the cast too: both are of one depth."""
    users = graph.users(node.outputs[0]) if is_cast(node) else ()
    return users[0].name if len(users) == 1 and users[0].op == MAX_POOL_BACKWARD else ""


def _makers(graph: Graph, node: Node) -> Iterator[str]:
    for name in node.refs():
        maker = graph.producer(name)
        if maker is not None:
            yield maker.name
