"""One node as it was: what makes a cover of every graph possible.

before: %p = aten.max_pool2d.default(%y, (3, 3), (2, 2))
-->
after:  op(p)         the same operator, in every memory format
"""

from __future__ import annotations

from collections.abc import Sequence

from convoy.graph.ir import Graph, Node
from convoy.regions.cut import subgraph_region
from convoy.regions.region import Region


def op_region(graph: Graph, node: Node, layouts: Sequence[str]) -> Region:
    """The region of one node."""
    return subgraph_region(graph, "op", (node.name,), layouts)
