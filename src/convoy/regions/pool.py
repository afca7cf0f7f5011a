"""A convolution with its epilogue and the pooling that follows, as one kernel.

before: %y = conv2d(%x, %w, %b, ...)
        %a = aten.relu.default(%y)
        %p = aten.max_pool2d.default(%a, (3, 3), (2, 2), (1, 1))
-->
after:  conv_pool(y+a+p)      p = max3x3s2x2p1x1(relu(conv(x, w) + b))      args x

and the same without the activation, and with a residual before it. A maximum commutes with an activation that never falls:

before: %y = conv2d(%x, %w, %b, ...)
        %p = aten.max_pool2d.default(%y, (2, 2))
        %a = aten.relu.default(%p)
-->
after:  conv_pool(y+p+a)      a = max2x2s2x2p0x0(relu(conv(x, w) + b))      args x

A step is taken only where the value before it has one reader and is not returned, so a region hides nothing and is convex.
Poolings with dilation, with indices that somebody reads, and with a divisor of their own stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from convoy.errors import InputError
from convoy.graph.ir import Arg, Graph, Node, Ref
from convoy.problem import ConvProblem, Pool, TensorSpec
from convoy.regions.activation import activation_of
from convoy.regions.conv import conv_region
from convoy.regions.epilogue import LayerChain, only_reader
from convoy.regions.region import Region

PATTERN: Final = "conv_pool"

MONOTONE: Final = frozenset({"relu", "relu6"})
"""Activations that never decrease, and keep NaN: the maximum of their values is their value at the maximum. (Sigmoid never
decreases either, but its rounding may.)"""

_MAX = (("kernel_size", None), ("stride", ()), ("padding", 0), ("dilation", 1), ("ceil_mode", False))
_AVG = (
    ("kernel_size", None),
    ("stride", ()),
    ("padding", 0),
    ("ceil_mode", False),
    ("count_include_pad", True),
    ("divisor_override", None),
)


def pool_regions(graph: Graph, chains: Sequence[LayerChain], layouts: Sequence[str], numerics: str) -> list[Region]:
    """A `conv2d` node's chains with the pooling that follows each; none if weights change from call to call, as in training.

    Args:
        graph: the net.
        chains: the node's chains (`epilogue.chains`).
        layouts: memory formats to offer.
        numerics: the rounding that the user allows.
    """
    found: list[Region] = []
    for chain in chains:
        if chain.has_dynamic_weight(graph):
            continue
        node = only_reader(graph, chain.result)
        pool = None if node is None else pool_of(graph, node)
        if node is None or pool is None:
            continue
        found.append(_region(graph, chain, (node,), pool, layouts, numerics))
        after = only_reader(graph, node.outputs[0])
        if after is not None and chain.activation == "none" and pool.kind == "max" and _acts_on(graph, after, node):
            found.append(
                _region(graph, replace(chain, activation=activation_of(after)), (node, after), pool, layouts, numerics)
            )
    return found


def pool_of(graph: Graph, node: Node) -> Pool | None:
    """The pooling that a node applies to its first argument, if that is 4-D and a `Pool` can express it; else None."""
    if not node.args or not isinstance(node.args[0], Ref) or any(node.outputs[1:]) or not node.outputs[0]:
        return None
    spec = graph.values[node.args[0].name].spec
    if len(spec.shape) != 4 or graph.values[node.outputs[0]].spec.dtype != spec.dtype:
        return None
    try:
        pool = _read(node, spec)
        made = None if pool is None else TensorSpec((*spec.shape[:2], *pool.size(*spec.shape[2:])), spec.dtype)
    except InputError:
        return None
    return pool if made == graph.values[node.outputs[0]].spec else None


def flattens(graph: Graph, node: Node) -> bool:
    """Whether a node flattens each image of a 4-D value into a row, in order."""
    if node.op != "aten.view.default" or not isinstance(node.args[0], Ref):
        return False
    n, *sides = graph.values[node.args[0].name].spec.shape
    return len(sides) == 3 and graph.values[node.outputs[0]].spec.shape == (n, math.prod(sides))


def _read(node: Node, spec: TensorSpec) -> Pool | None:
    if node.op == "aten.adaptive_avg_pool2d.default":
        whole = spec.shape[2:]
        return (
            Pool("avg", whole[0], whole[1], whole[0], whole[1])
            if node.args[1:] == ((1, 1),) and min(whole) > 0
            else None
        )
    if node.op in ("aten.max_pool2d.default", "aten.max_pool2d_with_indices.default"):
        window, stride, padding, dilation, ceil_mode = _arguments(node, _MAX)
        if _pair(dilation) != (1, 1):
            return None
        return Pool(
            "max", *_pair(window), *(_pair(stride) if stride else _pair(window)), *_pair(padding), ceil_mode is True
        )
    if node.op == "aten.avg_pool2d.default":
        window, stride, padding, ceil_mode, counted, divisor = _arguments(node, _AVG)
        if divisor is not None:
            return None
        sizes = (*_pair(window), *(_pair(stride) if stride else _pair(window)), *_pair(padding))
        # Without padding there is none to count: one text for both.
        return Pool("avg", *sizes, ceil_mode is True, counted is True and any(_pair(padding)))
    return None


def _region(
    graph: Graph, chain: LayerChain, more: tuple[Node, ...], pool: Pool, layouts: Sequence[str], numerics: str
) -> Region:
    plain = conv_region(graph, chain, layouts, numerics)
    problems = [p for p in plain.problems if isinstance(p, ConvProblem)]
    return replace(
        plain,
        pattern=PATTERN,
        nodes=(*chain.names, *(node.name for node in more)),
        results=(more[-1].outputs[0],),
        problems=tuple(replace(p, epilogue=replace(p.epilogue, pool=pool)) for p in problems),
    )


def _acts_on(graph: Graph, node: Node, pool: Node) -> bool:
    """Whether a node is an activation of a pooling's value that commutes with a maximum."""
    same = graph.values[node.outputs[0]].spec == graph.values[pool.outputs[0]].spec
    return same and list(node.refs()) == [pool.outputs[0]] and activation_of(node) in MONOTONE


def _arguments(node: Node, names: tuple[tuple[str, Arg], ...]) -> list[Arg]:
    """The arguments after the first, whether positional or by keyword."""
    given = dict(zip((name for name, _ in names), node.args[1:], strict=False)) | dict(node.kwargs)
    return [given.get(name, default) for name, default in names]


def _pair(arg: Arg) -> tuple[int, int]:
    """ATen's sizes: an integer, or a tuple of one or two."""
    sides = arg if isinstance(arg, tuple) else (arg,)
    first, last = (sides[0], sides[-1]) if sides else (0, 0)
    return (first, last) if isinstance(first, int) and isinstance(last, int) else (0, 0)
