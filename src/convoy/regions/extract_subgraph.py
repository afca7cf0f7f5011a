"""Extracts a subgraph with canonical names, so that equal subgraphs, of one net or of two, are one problem."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from convoy.graph.ir import Arg, Graph, Node, Ref, Value
from convoy.graph.text import print_graph
from convoy.problem import ANY_LAYOUT, SubgraphProblem, volume_layout
from convoy.regions.epilogue import LayerChain
from convoy.regions.region import Region

ExtractedSubgraph = tuple[SubgraphProblem, tuple[str, ...], tuple[str, ...], tuple[str, ...]]
"""The subgraph's problem; the values and the constants that it reads; and its results that other nodes read or the graph
returns."""

_MAX_LABEL = 60
"""Characters of a label, which is printed in a table's column."""


def extract_subgraph(graph: Graph, nodes: Sequence[str], layout: str) -> ExtractedSubgraph:
    """The problem of computing some nodes together.

    before: %relu = aten.relu.default(%conv1); %pool = aten.max_pool2d.default(%relu, (2, 2))
    -->
    after:  graph 1
            input %v0: ...
            %v1: ... = aten.relu.default(%v0)
            %v2: ... = aten.max_pool2d.default(%v1, (2, 2))
            return %v2

    Values are v0, v1, ... (inputs in order of first mention, then the nodes' values), constants c0, c1, ...

    Args:
        graph: the net.
        nodes: names of the nodes, a convex set.
        layout: memory format of the 4-D values at the border.

    Returns:
        The problem; the values read, the constants read and the results, each in the order of the problem's text.
    """
    chosen = [graph.node(name) for name in nodes]
    if len(chosen) > 1:
        wanted = set(nodes)
        chosen = [node for node in graph.nodes if node.name in wanted]
    made = [output for node in chosen for output in node.outputs if output]
    inside = {node.name for node in chosen}
    read = dict.fromkeys(name for node in chosen for name in node.refs() if name not in set(made))
    args = tuple(name for name in read if graph.values[name].kind != "constant")
    constants = tuple(name for name in read if graph.values[name].kind == "constant")
    exported = [o for o in made if o in graph.outputs or any(u.name not in inside for u in graph.users(o))]
    results = tuple(exported)
    text = print_graph(_canonical_graph(graph, chosen, args, constants, results))
    size = sum(graph.values[name].spec.size_bytes for name in (*args, *constants, *results))
    if len(chosen) == 1 and all(map(graph.is_transposed_view, results)):
        size = 0  # nothing is moved
    return SubgraphProblem(text, layout, size, _label(chosen)), args, constants, results


def subgraph_region(graph: Graph, pattern: str, nodes: tuple[str, ...], layouts: Sequence[str]) -> Region:
    """A region that keeps its operators: in every memory format, or in none if no value with one crosses its border."""
    problem, args, constants, results = extract_subgraph(graph, nodes, ANY_LAYOUT)
    offered = (ANY_LAYOUT,)
    if any(map(graph.has_layout, (*args, *results))):
        volumes = any(len(graph.values[name].spec.shape) == 5 for name in (*args, *results)) and graph.has_volumes
        offered = tuple(volume_layout(layout) for layout in layouts) if volumes else layouts
    return Region(pattern, nodes, args, constants, results, tuple(problem.with_layout(layout) for layout in offered))


def chains_region(graph: Graph, pattern: str, group: Sequence[LayerChain], layout: str) -> Region:
    """A region of several layers' chains in one memory format, for an engine that computes them together."""
    named = {name for chain in group for name in chain.names}
    names = tuple(node.name for node in graph.nodes if node.name in named)
    problem, args, constants, results = extract_subgraph(graph, names, layout)
    return Region(pattern, names, args, constants, results, (problem,))


def _canonical_graph(
    graph: Graph, nodes: Sequence[Node], args: Sequence[str], constants: Sequence[str], results: Sequence[str]
) -> Graph:
    """The nodes as a graph of their own, with canonical names."""
    needed = {name for node in nodes for name in node.refs()} | set(results)
    made = [output for node in nodes for output in node.outputs if output in needed]
    names = {name: f"c{i}" for i, name in enumerate(constants)}
    names |= {name: f"v{i}" for i, name in enumerate([*args, *made])}
    values: dict[str, Value] = {}
    for name in (*args, *constants, *made):
        kind = "input" if name in args else graph.values[name].kind
        values[names[name]] = replace(graph.values[name], name=names[name], kind=kind)
    renamed: list[Node] = []
    for node in nodes:
        outputs = tuple(names.get(output, "") for output in node.outputs)
        kwargs = tuple((key, _renamed(arg, names)) for key, arg in node.kwargs)
        first = next(filter(None, outputs))
        renamed.append(Node(first, node.op, tuple(_renamed(arg, names) for arg in node.args), kwargs, outputs))
    return Graph(tuple(names[a] for a in args), tuple(names[r] for r in results), values, tuple(renamed))


def _renamed(arg: Arg, names: Mapping[str, str]) -> Arg:
    if isinstance(arg, Ref):
        return Ref(names[arg.name])
    if isinstance(arg, tuple):
        return tuple(_renamed(item, names) for item in arg)
    return arg


def _label(nodes: Sequence[Node]) -> str:
    """The operators, for people: `relu x2 + cat`."""
    counts = Counter(node.op.split(".")[1] if "." in node.op else node.op for node in nodes)
    label = " + ".join(name if count == 1 else f"{name} x{count}" for name, count in counts.items())
    return label if len(label) <= _MAX_LABEL else f"{label[: _MAX_LABEL - 3]}..."
