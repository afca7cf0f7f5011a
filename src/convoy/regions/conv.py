"""A convolution, alone and with its epilogue.

before: %y = conv2d(%x, %w, %b, ...)
        %z = aten.add.Tensor(%y, %other)
        %a = aten.relu.default(%z)
-->
after:  conv(y)         y = conv(x, w) + b                     args x
        conv(y+z)       z = conv(x, w) + b + other             args x, other
        conv(y+z+a)     a = relu(conv(x, w) + b + other)       args x, other

and conv(y+a), if the activation follows directly. Each is a proposal of its own, in every memory format. In a graph that
computes its weights or takes them as inputs, as in training, %w and %b are args after x, and the problem has
`dynamic_weight`. `conv3d` nodes are treated alike. Those with a filter of depth 1, or of height and width 1, also have the
problem of a 2-D convolution, which the program computes on views (`Conv3dProblem.as_2d`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from convoy.graph.ir import Graph
from convoy.graph.layers import conv3d_problem, conv_problem
from convoy.problem import Conv3dProblem, Problem, volume_layout
from convoy.regions.epilogue import LayerChain
from convoy.regions.region import Region


def conv_region(graph: Graph, chain: LayerChain, layouts: Sequence[str], numerics: str) -> Region:
    """The region of a `conv2d` or `conv3d` node's chain."""
    layer = chain.nodes[0]
    x, weight, *bias = layer.refs()
    dynamic = chain.has_dynamic_weight(graph)
    plain = conv_problem(graph, layer) if layer.op == "conv2d" else conv3d_problem(graph, layer)
    problem = replace(plain, numerics=numerics, epilogue=chain.epilogue(), dynamic_weight=dynamic)
    added = (chain.residual,) if chain.residual else ()
    return Region(
        pattern="conv",
        nodes=chain.names,
        args=(x, weight, *bias, *added) if dynamic else (x, *added),
        constants=() if dynamic else (weight, *bias),
        results=(chain.result,),
        problems=problems_of_volumes(problem, layouts)
        if isinstance(problem, Conv3dProblem)
        else tuple(problem.with_layout(layout) for layout in layouts),
    )


def problems_of_volumes(problem: Conv3dProblem, layouts: Sequence[str]) -> tuple[Problem, ...]:
    """A three-dimensional convolution in every memory format, and as a 2-D one where views make it one."""
    volumes = [problem.with_layout(volume_layout(layout)) for layout in layouts]
    planes = [plane for one in volumes if (plane := one.as_2d()) is not None]
    return (*volumes, *planes)
