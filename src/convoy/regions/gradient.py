"""One direction of a convolution's backward pass; the weight gradient with the bias gradient if there are both.

before: %dx = conv2d_dgrad(%dy, %w, (8, 8), ...)
        %dw = conv2d_wgrad(%x, %dy, (3, 3), ...)
        %db = aten.sum.dim_IntList(%dy, (0, 2, 3))
-->
after:  dgrad(dx)          args dy, w; args dy if w is a constant (a transposed convolution)
        wgrad(dw)          args x, dy
        wgrad(dw+db)       args x, dy

each in every memory format, which x, w and their gradients have too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from convoy.graph.ir import Graph, Node
from convoy.graph.layers import gradient_problem
from convoy.problem import Epilogue
from convoy.regions.region import Region


def gradient_regions(graph: Graph, node: Node, layouts: Sequence[str], numerics: str) -> Iterator[Region]:
    """The regions of a `conv2d_dgrad` or `conv2d_wgrad` node; the last one includes the bias gradient if there is one."""
    problem = replace(gradient_problem(graph, node), numerics=numerics)
    constants = tuple(name for name in list(node.refs())[1:] if graph.values[name].kind == "constant")
    alone = Region(
        pattern=problem.direction,
        nodes=(node.name,),
        args=tuple(name for name in node.refs() if name not in constants),
        constants=constants,
        results=node.outputs,
        problems=tuple(problem.with_layout(layout) for layout in layouts),
    )
    yield alone
    bias = _bias_gradient(graph, node) if problem.direction == "wgrad" else None
    if bias is not None:
        both = replace(problem, epilogue=Epilogue(bias=True))
        names = {node.name, bias.name}
        yield replace(
            alone,
            nodes=tuple(other.name for other in graph.nodes if other.name in names),
            results=(*node.outputs, *bias.outputs),
            problems=tuple(both.with_layout(layout) for layout in layouts),
        )


def _bias_gradient(graph: Graph, node: Node) -> Node | None:
    """The node that sums the same dy over images and pixels."""
    dy = list(node.refs())[1]
    for user in graph.users(dy):
        if user.op == "aten.sum.dim_IntList" and user.args[1:] == ((0, 2, 3),) and not user.kwargs:
            return user
    return None
