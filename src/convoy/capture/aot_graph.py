"""capture_traced: a graph that AOTAutograd traced and cut (torch.compile's forward or backward pass), as a Captured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from convoy.capture.captured import Captured
from convoy.capture.draft import verify_captured
from convoy.capture.joint import ParameterNames
from convoy.capture.lower_nodes import NodeLowering
from convoy.capture.passes.fold_constants import copy_returned_constants
from convoy.capture.passes.one_dimensional import one_dimensional
from convoy.capture.passes.recognise_layers import recognise_layers
from convoy.capture.passes.regular_pools import regular_pools
from convoy.capture.passes.remove_identities import remove_identities
from convoy.capture.passes.remove_restrides import remove_restrides
from convoy.capture.passes.split_backward import split_backward
from convoy.capture.passes.three_dimensional import three_dimensional
from convoy.capture.passes.total_dropout import total_dropout
from convoy.capture.passes.transposed_convolutions import transposed_convolutions
from convoy.capture.passes.unset_values import unset_values
from convoy.capture.structure import ConstantLeaf, Leaf, Structure
from convoy.errors import CaptureError

PASSES = (
    remove_identities,
    total_dropout,
    unset_values,
    regular_pools,
    one_dimensional,
    three_dimensional,
    transposed_convolutions,
    recognise_layers,
    split_backward,
    copy_returned_constants,
)


def capture_traced(module: fx.GraphModule, inputs: Sequence[Any]) -> Captured:
    """Capture a functional ATen graph whose placeholders are its arguments in order.

    Args:
        module: the graph, with a fake tensor in each node's `meta["val"]`; it returns a flat sequence.
        inputs: its arguments.

    Raises:
        CaptureError: symbolic shapes, or what a graph cannot hold.
    """
    remove_restrides(module.graph)
    _casts_as_aten(module.graph)
    module.recompile()
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    if any(not isinstance(value, torch.Tensor) for value in inputs):
        raise CaptureError("the graph takes numbers as arguments: symbolic shapes are not supported")
    device = next((t.device for t in inputs), torch.device("cpu"))
    lowering = NodeLowering(device, ParameterNames({}))
    for node, given in zip(placeholders, inputs, strict=True):
        lowering.input(node, node.name, given)
    for node in module.graph.nodes:
        if node.op == "call_function":
            lowering.call(node)
        elif node.op == "get_attr":
            lowering.found[node] = lowering.draft.add_constant(str(node.target), getattr(module, str(node.target)))
    draft = lowering.draft
    (output,) = (node for node in module.graph.nodes if node.op == "output")
    leaves: list[Leaf] = []
    for value in pytree.tree_leaves(output.args[0], is_leaf=lambda v: v is None):
        found = lowering.found.get(value) if isinstance(value, fx.Node) else ConstantLeaf(value)
        if isinstance(found, str) and found:
            draft.outputs.append(found)
            leaves.append(None)
        elif isinstance(found, ConstantLeaf):
            leaves.append(found)
        else:
            raise CaptureError(f"the graph returns {value}, which is no tensor")
    traced, _ = draft.finish()
    for rewrite in PASSES:
        rewrite(draft)
    graph, constants = draft.finish()
    verify_captured(graph)
    held: list[Leaf] = [None] * len(graph.inputs)
    arguments = Structure(pytree.tree_structure((tuple(held), {})), held, plain=True)
    results = Structure(pytree.tree_structure(list(range(len(leaves)))), leaves)
    return Captured(graph, constants, arguments, results, tuple(dict.fromkeys(draft.notes)), traced=traced)


def _casts_as_aten(graph: fx.Graph) -> None:
    """Rewrite casts that AOTAutograd writes as an operator of `prims`, as where a float became an input, as ATen's."""
    for node in graph.nodes:
        if node.target is torch.ops.prims.convert_element_type.default:
            source, dtype = node.args
            node.target, node.args, node.kwargs = torch.ops.aten._to_copy.default, (source,), {"dtype": dtype}
