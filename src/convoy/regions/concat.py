"""Concatenations along channels whose inputs may be written straight into the result.

before: %c = aten.cat.default((%a, %b), 1)          a, b made by convolutions and read by no other node
-->
after:  the same regions; but if a and b are written into slices of c (`program.concat_in_place`), `op(c)` costs nothing

This is no region of its own: a region over the concatenation and the convolutions would tie their engines together, and each
of them has its own best.
"""

from __future__ import annotations

from convoy.graph.ir import Graph, Node, Ref
from convoy.regions.epilogue import only_reader

MAX_COPIED = 1
"""Inputs that a concatenation may still have to copy, one launch each: with more, its own single launch is as fast."""


def concat_inputs(graph: Graph, node: Node) -> tuple[str, ...]:
    """Names of the values that a node concatenates along channels: different ones, 4-D and of one dtype; else none."""
    if node.op != "aten.cat.default" or not node.args or len(node.outputs) != 1:
        return ()
    listed, *axis = node.args
    along = (*axis, *(value for name, value in node.kwargs if name == "dim"))
    result = graph.values[node.outputs[0]].spec
    if not isinstance(listed, tuple) or along not in ((1,), (-3,)) or len(result.shape) != 4:
        return ()
    names = [item.name for item in listed if isinstance(item, Ref)]
    specs = [graph.values[name].spec for name in names]
    plain = all(len(spec.shape) == 4 and spec.dtype == result.dtype for spec in specs)
    return tuple(names) if plain and len(set(names)) == len(names) == len(listed) else ()


def writable_in_place(graph: Graph, node: Node) -> tuple[str, ...]:
    """The inputs of a concatenation that a convolution's region makes only for it, which could be written in place.

    None if so many other inputs remain that the concatenation would stay as it is.
    """
    named = concat_inputs(graph, node)
    found = tuple(name for name in named if only_reader(graph, name) is node and graph.producer(name) is not None)
    return found if found and len(named) - len(found) <= MAX_COPIED else ()
