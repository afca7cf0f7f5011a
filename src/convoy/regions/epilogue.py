"""A convolution or linear layer with what may follow it in the same kernel.

    %y = conv2d(%x, %w, %b, ...)      -->  conv(y)              y = conv(x, w) + b
    %z = aten.add.Tensor(%y, %other)  -->  conv(y+z)            z = conv(x, w) + b + other
    %a = aten.relu.default(%z)        -->  conv(y+z+a)          a = relu(conv(x, w) + b + other)

Every prefix is a proposal of its own. A step is taken only where the value before it has no other reader and is not
returned, so a region hides nothing that somebody wants; and since a chain of single readers has one way out, it is convex.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from convoy.graph.ir import Graph, Node, Ref
from convoy.graph.verify import conv_problem, linear_problem
from convoy.problem import ConvProblem, Epilogue, LinearProblem, Problem
from convoy.regions.region import Region

_PLAIN: Final[dict[str, str]] = {
    "aten.relu.default": "relu",
    "aten.relu6.default": "relu6",
    "aten.silu.default": "silu",
    "aten.hardswish.default": "hardswish",
    "aten.hardsigmoid.default": "hardsigmoid",
    "aten.sigmoid.default": "sigmoid",
}


@dataclass(frozen=True, slots=True)
class _Chain:
    """What has been taken so far: nodes, the residual's name, the activation, the value that comes out."""

    nodes: tuple[str, ...]
    residual: str
    activation: str
    value: str


def epilogue_regions(graph: Graph, node: Node, layouts: Sequence[str], numerics: str) -> list[Region]:
    """All regions that start with a `conv2d` or `linear` node."""
    chains = [_Chain((node.name,), "", "none", node.outputs[0])]
    added = _with_residual(graph, chains[0])
    if added:
        chains.append(added)
    chains += [active for chain in tuple(chains) if (active := _with_activation(graph, chain))]
    return [_region(graph, node, chain, layouts, numerics) for chain in chains]


def activation_of(node: Node) -> str:
    """The epilogue's name of a node's operator; empty where it is none."""
    rest = (*node.args[1:], *(arg for _, arg in node.kwargs))
    if node.op in _PLAIN and not rest:
        return _PLAIN[node.op]
    bounds = tuple(float(arg) if isinstance(arg, (int, float)) else arg for arg in rest)
    if node.op in ("aten.hardtanh.default", "aten.clamp.default") and bounds == (0.0, 6.0):
        return "relu6"
    if node.op == "aten.clamp_min.default" and bounds == (0.0,):
        return "relu"
    if node.op == "aten.gelu.default" and rest in ((), ("none",)):
        return "gelu"
    return ""


def _only_reader(graph: Graph, value: str) -> Node | None:
    users = graph.users(value)
    return users[0] if len(users) == 1 and value not in graph.outputs else None


def _with_residual(graph: Graph, chain: _Chain) -> _Chain | None:
    node = _only_reader(graph, chain.value)
    if node is None or node.op != "aten.add.Tensor" or node.kwargs or len(node.args) != 2:
        return None
    names = [arg.name for arg in node.args if isinstance(arg, Ref)]
    others = [name for name in names if name != chain.value]
    if len(names) != 2 or len(others) != 1 or graph.values[others[0]].kind == "constant":
        return None
    if graph.values[others[0]].spec != graph.values[chain.value].spec:
        return None
    return _Chain((*chain.nodes, node.name), others[0], "none", node.outputs[0])


def _with_activation(graph: Graph, chain: _Chain) -> _Chain | None:
    node = _only_reader(graph, chain.value)
    activation = activation_of(node) if node is not None else ""
    if node is None or not activation or graph.values[node.outputs[0]].spec != graph.values[chain.value].spec:
        return None
    return _Chain((*chain.nodes, node.name), chain.residual, activation, node.outputs[0])


def _region(graph: Graph, node: Node, chain: _Chain, layouts: Sequence[str], numerics: str) -> Region:
    x, weight, *bias = node.refs()
    epilogue = Epilogue(bool(bias), bool(chain.residual), chain.activation)
    problems: tuple[Problem, ...]
    if node.op == "conv2d":
        base: ConvProblem = replace(conv_problem(graph, node), numerics=numerics, epilogue=epilogue)
        problems = tuple(base.with_layout(layout) for layout in layouts)
    else:
        linear: LinearProblem = replace(linear_problem(graph, node), numerics=numerics, epilogue=epilogue)
        problems = (linear,)
    return Region(
        pattern="conv" if node.op == "conv2d" else "linear",
        nodes=chain.nodes,
        args=(x, chain.residual) if chain.residual else (x,),
        constants=(weight, *bias),
        results=(chain.value,),
        problems=problems,
    )
