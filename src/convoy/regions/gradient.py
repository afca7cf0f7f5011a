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

from convoy.graph.ir import VOLUME_GRADIENTS, Graph, Node
from convoy.graph.layers import gradient3d_problem, gradient_problem
from convoy.problem import Conv3dProblem, ConvProblem, Epilogue, Problem
from convoy.regions.conv import problems_of_volumes
from convoy.regions.region import Region


def has_constant_image(graph: Graph, node: Node) -> bool:
    """Whether one of `GRADIENTS` reads a constant besides a weight, such as the image that a convolution of positions reads."""
    images = list(node.refs())[: 2 if node.op.endswith("wgrad") else 1]
    return any(graph.values[name].kind == "constant" for name in images)


def gradient_regions(graph: Graph, node: Node, layouts: Sequence[str], numerics: str) -> Iterator[Region]:
    """The regions of one of `GRADIENTS`; the last one includes the bias gradient if there is one."""
    volumes = node.op in VOLUME_GRADIENTS
    plain = gradient3d_problem(graph, node) if volumes else gradient_problem(graph, node)
    problem = replace(plain, numerics=numerics)
    constants = tuple(name for name in list(node.refs())[1:] if graph.values[name].kind == "constant")
    alone = Region(
        pattern=problem.direction,
        nodes=(node.name,),
        args=tuple(name for name in node.refs() if name not in constants),
        constants=constants,
        results=node.outputs,
        problems=_in_layouts(problem, layouts),
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
            problems=_in_layouts(both, layouts),
        )


def _in_layouts(problem: ConvProblem | Conv3dProblem, layouts: Sequence[str]) -> tuple[Problem, ...]:
    if isinstance(problem, Conv3dProblem):
        return problems_of_volumes(problem, layouts)
    return tuple(problem.with_layout(layout) for layout in layouts)


def _bias_gradient(graph: Graph, node: Node) -> Node | None:
    """The node that sums the same dy over images and pixels."""
    dy = list(node.refs())[1]
    sides = (0, *range(2, len(graph.values[dy].spec.shape)))
    for user in graph.users(dy):
        if user.op == "aten.sum.dim_IntList" and user.args[1:] == (sides,) and not user.kwargs:
            return user
    return None
