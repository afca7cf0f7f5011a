"""All proposals for a graph."""

from __future__ import annotations

from convoy.graph.ir import Graph
from convoy.regions.epilogue import epilogue_regions
from convoy.regions.glue import MAIN_OPERATORS, glue_regions, op_region
from convoy.regions.region import Region


def propose(graph: Graph, *, layouts: tuple[str, ...], numerics: str) -> list[Region]:
    """Regions that selection may cover the graph with.

    Every node is covered by a region of its own (`conv`, `linear` or `op`), so a cover always exists.

    Args:
        graph: a graph that `verify` accepts.
        layouts: memory formats to offer for 4-D values, the caller's first.
        numerics: the rounding that the user allows; part of every convolution's problem.
    """
    found: list[Region] = []
    taken: set[str] = set()
    for node in graph.nodes:
        if node.op in MAIN_OPERATORS:
            own = epilogue_regions(graph, node, layouts, numerics)
            taken.update(name for region in own for name in region.nodes[1:])
            found += own
        else:
            found.append(op_region(graph, node, layouts))
    return found + glue_regions(graph, taken, layouts)
