"""Cut a piece out of a graph, with canonical names, so that equal pieces of one or of two nets are one problem."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from convoy.graph.ir import Arg, Graph, Node, Ref, Value
from convoy.graph.text import print_graph
from convoy.problem import SubgraphProblem


def cut(
    graph: Graph, nodes: Sequence[str], layout: str
) -> tuple[SubgraphProblem, tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """The problem of computing some nodes together.

    Args:
        graph: the net.
        nodes: names of nodes, in graph order.
        layout: memory format of 4-D values at the border.

    Returns:
        The problem; the values read, the constants read, and the values that are read outside or returned, each in the
        order in which the problem's text has them.
    """
    chosen = [graph.node(name) for name in nodes] if len(nodes) == 1 else _in_order(graph, set(nodes))
    made = {output for node in chosen for output in node.outputs if output}
    read = dict.fromkeys(name for node in chosen for name in node.refs() if name not in made)
    args = tuple(name for name in read if graph.values[name].kind != "constant")
    constants = tuple(name for name in read if graph.values[name].kind == "constant")
    inside = {node.name for node in chosen}
    results = tuple(
        output
        for node in chosen
        for output in node.outputs
        if output and (output in graph.outputs or any(user.name not in inside for user in graph.users(output)))
    )
    names = {name: f"v{i}" for i, name in enumerate(args)} | {name: f"c{i}" for i, name in enumerate(constants)}
    names |= {output: f"n{i}" for i, output in enumerate(o for node in chosen for o in node.outputs if o)}
    piece = _rename(graph, chosen, args, constants, results, names)
    size = sum(graph.values[name].spec.size_bytes for name in (*args, *constants, *results))
    label = "+".join(dict.fromkeys(node.op.split(".")[1] if "." in node.op else node.op for node in chosen))
    return SubgraphProblem(print_graph(piece), layout, size, label), args, constants, results


def _in_order(graph: Graph, names: set[str]) -> list[Node]:
    return [node for node in graph.nodes if node.name in names]


def _rename(
    graph: Graph,
    nodes: Sequence[Node],
    args: tuple[str, ...],
    constants: tuple[str, ...],
    results: tuple[str, ...],
    names: dict[str, str],
) -> Graph:
    renamed: list[Node] = []
    for node in nodes:
        read_outside = set(results) | {name for other in nodes for name in other.refs()}
        outputs = tuple(names[o] if o in read_outside else "" for o in node.outputs)
        first = next(o for o in outputs if o)
        renamed.append(
            Node(
                first,
                node.op,
                tuple(_replace(arg, names) for arg in node.args),
                tuple((key, _replace(arg, names)) for key, arg in node.kwargs),
                outputs,
            )
        )
    values: dict[str, Value] = {}
    for name in args:
        values[names[name]] = replace(graph.values[name], name=names[name], kind="input")
    for name in constants:
        values[names[name]] = replace(graph.values[name], name=names[name])
    for node in nodes:
        for output in node.outputs:
            if output and any(names[output] in n.outputs for n in renamed):
                values[names[output]] = replace(graph.values[output], name=names[output])
    return Graph(tuple(names[a] for a in args), tuple(names[r] for r in results), values, tuple(renamed))


def _replace(arg: Arg, names: dict[str, str]) -> Arg:
    if isinstance(arg, Ref):
        return Ref(names[arg.name])
    if isinstance(arg, tuple):
        return tuple(_replace(item, names) for item in arg)
    return arg
