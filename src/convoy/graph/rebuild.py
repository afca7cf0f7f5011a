"""Builds a graph from parts: without dead nodes, unread outputs unnamed, values in canonical order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from convoy.graph.ir import Graph, Node, Value


def rebuild(
    inputs: tuple[str, ...], outputs: tuple[str, ...], values: Mapping[str, Value], nodes: Sequence[Node]
) -> Graph:
    """A graph that computes `outputs`.

    Args:
        inputs: the inputs, all of which are kept.
        outputs: values returned.
        values: at least every needed value; others are left out.
        nodes: in executable order; nodes that are not needed are left out.
    """
    needed = set(outputs)
    kept: list[Node] = []
    for node in reversed(nodes):
        if needed.intersection(filter(None, node.outputs)):
            kept.append(node)
            needed.update(node.refs())
    kept.reverse()
    kept = [replace(node, outputs=tuple(o if o in needed else "" for o in node.outputs)) for node in kept]
    mentioned = [*inputs]
    for node in kept:
        mentioned += [*node.refs(), *filter(None, node.outputs)]
    mentioned += outputs
    return Graph(inputs, outputs, {name: values[name] for name in dict.fromkeys(mentioned)}, tuple(kept))
