"""A linear layer, alone and with its epilogue.

before: %y = linear(%x, %w, %b)
        %z = aten.add.Tensor(%y, %other)
        %a = aten.relu.default(%z)
-->
after:  linear(y)         y = x · w^T + b                     args x
        linear(y+z)       z = x · w^T + b + other             args x, other
        linear(y+z+a)     a = relu(x · w^T + b + other)       args x, other

and linear(y+a), where the activation follows at once. Matrices have no memory format to choose.
"""

from __future__ import annotations

from dataclasses import replace

from convoy.graph.ir import Graph
from convoy.graph.layers import linear_problem
from convoy.regions.epilogue import LayerChain
from convoy.regions.region import Region


def linear_region(graph: Graph, chain: LayerChain, numerics: str) -> Region:
    """The region of a `linear` node's chain."""
    layer = chain.nodes[0]
    x, weight, *bias = layer.refs()
    return Region(
        pattern="linear",
        nodes=chain.names,
        args=(x, chain.residual) if chain.residual else (x,),
        constants=(weight, *bias),
        results=(chain.result,),
        problems=(replace(linear_problem(graph, layer), numerics=numerics, epilogue=chain.epilogue()),),
    )
