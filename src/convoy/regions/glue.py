"""Everything between convolutions: each node by itself, and neighbours together.

    %p = aten.max_pool2d.default(%y, ...)      -->  op(p), op(c), op(r), glue(p+c+r)
    %c = aten.cat.default((%p, %z), 1)
    %r = aten.relu.default(%c)

Neighbours are grouped by depth, the number of convolutions and linear layers on the longest way from the inputs: a way that
leaves a group through a convolution comes out deeper, so a connected group of one depth is convex.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from convoy.graph.ir import Graph, Node
from convoy.problem import ANY_LAYOUT, SubgraphProblem
from convoy.regions.cut import cut
from convoy.regions.region import Region

MAIN_OPERATORS = frozenset({"conv2d", "linear"})


def op_region(graph: Graph, node: Node, layouts: Sequence[str]) -> Region:
    """One node as it was."""
    return _subgraph_region(graph, "op", (node.name,), layouts)


def glue_regions(graph: Graph, absorbable: Collection[str], layouts: Sequence[str]) -> list[Region]:
    """Groups of several nodes; and what is left of each group when epilogues take the nodes that they can."""
    proposals: dict[tuple[str, ...], None] = {}
    for group in groups(graph):
        proposals[tuple(group)] = None
        for rest in connected(graph, [name for name in group if name not in absorbable]):
            proposals[tuple(rest)] = None
    return [
        _subgraph_region(graph, "glue", nodes, layouts)
        for nodes in proposals
        if len(nodes) > 1 and is_convex(graph, set(nodes))
    ]


def groups(graph: Graph) -> list[list[str]]:
    """Connected nodes of equal depth that are neither convolution nor linear layer, each group in graph order."""
    depth = depths(graph)
    by_depth: dict[int, list[str]] = {}
    for node in graph.nodes:
        if node.op not in MAIN_OPERATORS:
            by_depth.setdefault(depth[node.name], []).append(node.name)
    return [group for _, names in sorted(by_depth.items()) for group in connected(graph, names)]


def depths(graph: Graph) -> dict[str, int]:
    """For each node the convolutions and linear layers on the longest way to it, itself included."""
    found: dict[str, int] = {}
    for node in graph.nodes:
        before = [found[maker.name] for name in node.refs() if (maker := graph.producer(name)) is not None]
        found[node.name] = max(before, default=0) + (node.op in MAIN_OPERATORS)
    return found


def connected(graph: Graph, names: Sequence[str]) -> list[list[str]]:
    """Split nodes into connected groups; order within a group is kept."""
    chosen = set(names)
    label = {name: name for name in names}

    def root(name: str) -> str:
        while label[name] != name:
            name = label[name]
        return name

    for name in names:
        for value in graph.node(name).refs():
            maker = graph.producer(value)
            if maker is not None and maker.name in chosen:
                label[root(name)] = root(maker.name)
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(root(name), []).append(name)
    return list(found.values())


def is_convex(graph: Graph, nodes: Collection[str]) -> bool:
    """Whether no way between two of the nodes leads through a node outside."""
    tainted: set[str] = set()
    for node in graph.nodes:
        makers = [maker.name for name in node.refs() if (maker := graph.producer(name)) is not None]
        if node.name in nodes:
            if any(maker in tainted for maker in makers):
                return False
        elif any(maker in tainted or maker in nodes for maker in makers):
            tainted.add(node.name)
    return True


def _subgraph_region(graph: Graph, pattern: str, nodes: tuple[str, ...], layouts: Sequence[str]) -> Region:
    problem, args, constants, results = cut(graph, nodes, layouts[0])
    images = any(len(graph.values[name].spec.shape) == 4 for name in (*args, *results))
    problems: tuple[SubgraphProblem, ...] = (
        tuple(problem.with_layout(layout) for layout in layouts) if images else (problem.with_layout(ANY_LAYOUT),)
    )
    return Region(pattern, nodes, args, constants, results, problems)
