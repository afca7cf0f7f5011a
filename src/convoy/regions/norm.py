"""A batch norm of a training step with its neighbours, for an engine that computes both (`triton.batch_norm`).

before: %y, %mean, %rstd, ... = aten._native_batch_norm_legit_functional.default(%x, ...)
        %s = aten.add.Tensor(%y, %other)
        %z = aten.relu.default(%s)
-->
after:  norm(y+s+z)           if no other node reads y and s

before: %s = aten.add.Tensor(%one, %other)
        %m = aten.threshold_backward.default(%s, %z, 0)
        %dx, %dw, %db = aten.native_batch_norm_backward.default(%m, %x, ...)
-->
after:  norm(m+dx), norm(s+m+dx)          m may have other readers

before: %p = aten.slice.Tensor(%whole, 1, 0, 64)             a branch's part of a concatenation's gradient
        %m = aten.threshold_backward.default(%p, %z, 0)
        %dx, %dw, %db = aten.native_batch_norm_backward.default(%m, %x, ...)
-->
after:  norm(p+m+dx)

A `glue` group often holds the branches of a whole block; these are one branch's, which need not wait for the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from convoy.graph.ir import Graph, Node, Ref
from convoy.regions.extract_subgraph import subgraph_region
from convoy.regions.region import Region

FORWARD: Final = "aten._native_batch_norm_legit_functional.default"
BACKWARD: Final = "aten.native_batch_norm_backward.default"


def norm_regions(graph: Graph, layouts: Sequence[str]) -> list[Region]:
    """The chains of every batch norm, longest last."""
    found: list[Region] = []
    for node in graph.nodes:
        chains = _after(graph, node) if node.op == FORWARD else _before(graph, node) if node.op == BACKWARD else ()
        found += [subgraph_region(graph, "norm", chain, layouts) for chain in chains]
    return found


def _after(graph: Graph, node: Node) -> Iterator[tuple[str, ...]]:
    """A forward norm with a sum, a ReLU, or both."""
    chain = (node.name,)
    follower = _only_reader(graph, node)
    if follower is not None and _is_sum(graph, follower):
        chain = (*chain, follower.name)
        yield chain
        follower = _only_reader(graph, follower)
    if follower is not None and follower.op == "aten.relu.default":
        yield (*chain, follower.name)


def _before(graph: Graph, node: Node) -> Iterator[tuple[str, ...]]:
    """A backward norm with a mask, or a sum and a mask, before it."""
    mask = _maker(graph, node)
    if mask is None or mask.op != "aten.threshold_backward.default" or mask.args[2] != 0:
        return
    yield (mask.name, node.name)
    before = _maker(graph, mask)
    fits = before is not None and (_is_sum(graph, before) or _is_part(before))
    if before is not None and fits and _only_reader(graph, before) == mask:
        yield (before.name, mask.name, node.name)


def _only_reader(graph: Graph, node: Node) -> Node | None:
    """The only node that reads a node's first output, if that is not returned."""
    output = node.outputs[0]
    readers = graph.users(output) if output and output not in graph.outputs else ()
    return readers[0] if len(readers) == 1 else None


def _maker(graph: Graph, node: Node) -> Node | None:
    """The node that makes a node's first argument."""
    first = node.args[0]
    return graph.producer(first.name) if isinstance(first, Ref) else None


def _is_sum(graph: Graph, node: Node) -> bool:
    """Whether a node adds two values of one shape and dtype."""
    if node.op != "aten.add.Tensor" or node.kwargs:
        return False
    specs = [graph.values[arg.name].spec for arg in node.args if isinstance(arg, Ref)]
    return len(node.args) == 2 and len(set(node.refs())) == 2 and len(set(specs)) == 1


def _is_part(node: Node) -> bool:
    """Whether a node takes consecutive channels of a value."""
    return node.op == "aten.slice.Tensor" and not node.kwargs and len(node.args) == 4 and node.args[1] == 1
