"""One node as it is, so that every graph has a cover.

before: %p = aten.max_pool2d.default(%y, (3, 3), (2, 2))
-->
after:  op(p)         the same operator, in every memory format

before: %d, %m = aten.native_dropout.default(%y, 0.5, True)
-->
after:  draw(d)       only in the caller's memory format: PyTorch draws numbers in the order of the values in memory, which is
                      this one unless the node says another (`convoy.graph.randomness.MEMORY_ORDER`)
"""

from __future__ import annotations

from collections.abc import Sequence

from convoy.graph.ir import Graph, Node
from convoy.graph.randomness import draws_random
from convoy.regions.extract_subgraph import subgraph_region
from convoy.regions.region import Region


def op_region(graph: Graph, node: Node, layouts: Sequence[str]) -> Region:
    """The region of one node; `layouts` has the caller's first."""
    if draws_random(node):
        return subgraph_region(graph, "draw", (node.name,), layouts[:1])
    return subgraph_region(graph, "op", (node.name,), layouts)
