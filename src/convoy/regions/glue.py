"""The nodes between layers, grouped: one kernel instead of one per node, if a compiler can fuse them (pattern `glue`).

before: %r = aten.relu.default(%y)                      y made by a convolution
        %p = aten.max_pool2d.default(%r, (3, 3))
        %c = aten.cat.default((%p, %z), 1)
-->
after:  glue(r+p+c)
        glue(p+c)         for the cover in which the convolution's epilogue takes r

A node with a kernel of its own (`SEPARATE_OPS`) is a group by itself, with the casts of its arguments, and left out of a
further variant. So is a pooling, with the node that flattens it for a linear layer, if there is an engine for it.

Nodes are grouped by depth, the number of layers on the longest path to them (`LAYERS`, and nodes that draw random numbers);
connected nodes of one depth form a group. (Layers without such nodes before them are not counted.) A cast that its only
reader's kernel can do has that reader's depth. A group is convex: depth never decreases along a path, so a path from one of
its nodes to another stays at one depth; a layer on it would have increased the depth, so it consists of nodes of that depth,
which are connected to both ends and therefore in the group. The same holds for the rest when epilogues take some nodes: those
count as layers do.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Final

from convoy.graph.ir import AVG_POOL_BACKWARD, LAYERS, MAX_POOL_BACKWARD, Graph, Node
from convoy.graph.randomness import draws_random, is_recurrent
from convoy.regions.casts import is_cast
from convoy.regions.epilogue import only_reader
from convoy.regions.extract_subgraph import subgraph_region
from convoy.regions.pool import flattens, pool_of
from convoy.regions.region import Region

SEPARATE_OPS: Final = (MAX_POOL_BACKWARD, AVG_POOL_BACKWARD)
"""Operators with a kernel of their own (`triton.pool_backward`), which a group would run slower. The first one's kernel reads
its indices as they are stored: it does the cast that widens them."""


def glue_regions(
    graph: Graph,
    epilogues: set[str],
    layouts: Sequence[str],
    norms: Collection[str] = (),
    *,
    pools: bool = False,
    apart: Sequence[tuple[str, ...]] = (),
) -> list[Region]:
    """Groups of several nodes, and their rest when epilogues take all nodes that they can, or some nodes stay alone.

    There are only these variants of a group, because each is a kernel to compile: a cover in which only some epilogues take
    their nodes finds the rest as single nodes.

    Args:
        graph: the net.
        epilogues: names of all nodes that some layer's epilogue could take.
        layouts: memory formats to offer.
        norms: names of the nodes that batch norms could take, the norms included.
        pools: whether an engine computes poolings by themselves.
        apart: convex groups of nodes that are also offered by themselves; every other group then leaves them out.
    """
    layers = [node.name for node in graph.nodes if node.op in LAYERS or draws_random(node) or is_recurrent(node)]
    layers += [name for names in apart for name in names]
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
    found.update(dict.fromkeys(apart))
    return [subgraph_region(graph, "glue", nodes, layouts) for nodes in found if len(nodes) > 1]


def _with_cast(graph: Graph, node: Node) -> tuple[str, ...]:
    """A node, with the casts that widen its arguments only for it, if its kernel reads them unwidened."""
    makers = [graph.node(name) for name in dict.fromkeys(_makers(graph, node))]
    return (*(one.name for one in makers if _late_reader(graph, one) == node.name), node.name)


def _with_view(graph: Graph, node: Node) -> tuple[str, ...]:
    """A pooling, with its only reader if that flattens it."""
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
    """For each node the barriers on the longest path to it, itself included, from a node that is no barrier."""
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
    """The only node that reads a cast, if that node's own kernel does the cast: both have one depth."""
    users = graph.users(node.outputs[0]) if is_cast(node) else ()
    return users[0].name if len(users) == 1 and users[0].op == MAX_POOL_BACKWARD else ""


def _makers(graph: Graph, node: Node) -> Iterator[str]:
    for name in node.refs():
        maker = graph.producer(name)
        if maker is not None:
            yield maker.name
