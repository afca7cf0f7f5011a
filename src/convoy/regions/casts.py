"""The casts that autocast makes of every weight, grouped: one launch instead of one per layer.

before: %a = aten._to_copy.default(%conv1.weight, dtype=dtype.bf16)        parameters, fp32
        %b = aten._to_copy.default(%conv2.weight, dtype=dtype.bf16)
        ...
        %x = aten._to_copy.default(%conv1.wgrad, dtype=dtype.fp32)         gradients, returned
        %y = aten._to_copy.default(%conv2.wgrad, dtype=dtype.fp32)
-->
after:  casts(a+b)      at the start, of the graph's inputs
        casts(x+y)      at the end, of the graph's results

Gradients of weights form a group of their own: a cast beside a loss may better be part of a larger subgraph, and would take
the whole group with it. If gradients are sent to other processes, each bucket is a group: one launch for all would make the
first bucket wait for the last.

A group only reads the graph's inputs, or its results are read by no node, so no path leads from one of its nodes to another:
it is convex.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from convoy.graph.ir import Graph, Node
from convoy.regions.extract_subgraph import subgraph_region
from convoy.regions.region import Region


def cast_regions(graph: Graph, layouts: Sequence[str], buckets: Sequence[Collection[str]] = ()) -> list[Region]:
    """The casts of inputs, of weight gradients and of other results, each group of two or more, of one dtype.

    Args:
        graph: the graph.
        layouts: memory formats to offer for 4-D values.
        buckets: names of results that are sent to other processes together: no group has results of two buckets.
    """
    bucket_of = {name: number for number, names in enumerate(buckets) for name in names}
    groups: dict[tuple[str, str, str, int | None], list[str]] = {}
    for node in graph.nodes:
        place = _place(graph, node)
        if place:
            (source,) = node.refs()
            dtypes = graph.values[source].spec.dtype, graph.values[node.outputs[0]].spec.dtype
            groups.setdefault((place, *dtypes, bucket_of.get(node.outputs[0])), []).append(node.name)
    return [subgraph_region(graph, "casts", tuple(names), layouts) for names in groups.values() if len(names) > 1]


def is_cast(node: Node) -> bool:
    """Whether a node only changes its argument's dtype."""
    return (
        node.op == "aten._to_copy.default"
        and len(node.args) == 1
        and {k for k, _ in node.kwargs} <= {"dtype", "device"}
    )


def _place(graph: Graph, node: Node) -> str:
    """`start`, `gradients` or `end` for a cast that may join a group; empty for any other node."""
    if not is_cast(node):
        return ""
    (source,) = node.refs()
    if graph.values[source].kind == "input":
        return "start"
    output, producer = node.outputs[0], graph.producer(source)
    if output not in graph.outputs or graph.users(output):
        return ""
    return "gradients" if producer is not None and producer.op in ("conv2d_wgrad", "conv3d_wgrad") else "end"
