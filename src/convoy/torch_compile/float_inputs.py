"""Floats of modules, such as a batch norm's `eps`, that Dynamo makes inputs under `dynamic=True`: they become constants again."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx


def fix_floats(graph_module: fx.GraphModule) -> None:
    """Replace, in a graph that Dynamo caught, the floats that need not be inputs by their values.

    These are floats that Dynamo guards already, and with `dynamic=True` all attributes of modules, which are guarded then: with
    another value Dynamo compiles another graph. Else every net with a batch norm would have inputs that depend on data.
    The inputs stay, unused.
    """
    from torch.fx.experimental.symbolic_shapes import guard_scalar

    changed = False
    for node in list(graph_module.graph.nodes):
        if node.op != "call_method" or node.target != "item" or len(node.args) != 1:
            continue
        made: Any = node.meta.get("example_value")
        source = node.args[0]
        if isinstance(made, torch.SymFloat) and isinstance(source, fx.Node) and _is_fixed(made, source):
            node.replace_all_uses_with(guard_scalar(made))  # pyright: ignore[reportArgumentType] - fx takes numbers as arguments
            graph_module.graph.erase_node(node)
            changed = True
    if changed:
        graph_module.recompile()


def has_float_input(graph_module: fx.GraphModule) -> bool:
    """Whether a float of the caller's that changes from call to call is an input, which Dynamo passes as a tensor."""
    return any(
        node.op == "placeholder"
        and bool(node.users)
        and getattr(node.meta.get("grapharg"), "pass_arg_as_tensor", False)
        for node in graph_module.graph.nodes
    )


def _is_fixed(made: Any, source: fx.Node) -> bool:
    if made.node.expr.is_number:
        return True
    given = source.meta.get("grapharg")
    if torch._dynamo.config.assume_static_by_default or given is None:
        return False
    place = given.source.guard_source
    place = place() if callable(place) else place  # a method in torch 2.11
    return bool(place.is_unspecialized_nn_module() or place.is_specialized_nn_module())
