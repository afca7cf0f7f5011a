"""From an exported program to one in which no call writes to its operands and none is a composite that hides another.

`ExportedProgram.run_decompositions` does that for any program by tracing it once more, which takes longer than exporting it did
(ResNet-50: 1.0 s after 0.9 s). Most CNNs need rewrites of single calls alone: activations and additions in place, batch norm in
evaluation mode, flatten, reshape, chunk, dropout that drops nothing. Programs of such calls are rewritten here, to the very same
graph.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind

from convoy.capture.recording.simple_calls import IN_PLACE, RESHAPES, SimpleCalls

aten: Any = torch.ops.aten


def functional(program: ExportedProgram) -> ExportedProgram:
    """The program without writes, with every composite operator kept that run-time engines know by its name.

    Args:
        program: as `torch.export.export` makes it. It may be changed: its graph, and what its signature says of inputs and kinds
            of outputs, then hold; its module and the outputs' names do not.
    """
    if not _is_simple(program):
        return cast("Any", program).run_decompositions({})
    rewrite_calls(program.graph)
    return program


def rewrite_calls(graph: fx.Graph) -> None:
    """Rewrite calls that `SimpleCalls` accepts, in place."""
    place = {node: index for index, node in enumerate(graph.nodes)}
    for node in place:
        if node.op == "call_function":
            _rewrite(graph, node, place)
    graph.eliminate_dead_code()


def _is_simple(program: ExportedProgram) -> bool:
    """Whether `SimpleCalls` accepts every call, and the model changes nothing."""
    if any(spec.kind is not OutputKind.USER_OUTPUT for spec in program.graph_signature.output_specs):
        return False
    calls = SimpleCalls()
    return all(node.op in ("placeholder", "output") or calls.accepts(node) for node in program.graph.nodes)


def _rewrite(graph: fx.Graph, node: fx.Node, place: dict[fx.Node, int]) -> None:
    """Put in a call's place what computes the same without a write; `place` has the calls as they were, in order."""
    operand = node.args[0]
    if node.target in IN_PLACE:
        assert isinstance(operand, fx.Node)
        node.target = IN_PLACE[node.target]
        operand.replace_all_uses_with(node, lambda user: place.get(user, 0) > place[node])
    elif node.target is aten.batch_norm.default:
        _rewrite_batch_norm(graph, node)
    elif node.target in (aten.group_norm.default, aten.layer_norm.default):
        node.args = _without_cudnn(node.args)
    elif node.target in RESHAPES:
        assert isinstance(operand, fx.Node)
        _rewrite_reshape(graph, node, operand)
    elif node.target is aten.contiguous.default:
        assert isinstance(operand, fx.Node)
        if operand.meta["val"].is_contiguous():  # the very same tensor
            node.replace_all_uses_with(operand)
            graph.erase_node(node)
        else:
            node.target, node.kwargs = aten.clone.default, {"memory_format": torch.contiguous_format}
    elif node.target is aten.expand_as.default:
        node.target, node.args = aten.expand.default, (operand, list(node.meta["val"].shape))
    elif node.target is aten.chunk.default:
        assert isinstance(operand, fx.Node)
        _, count, *dim = node.args
        axis = dim[0] if dim else 0
        parts = -(-operand.meta["val"].shape[axis] // count)
        node.target, node.args = aten.split.Tensor, (operand, parts, *([axis] if axis else []))
    elif node.target is aten.dropout.default:
        node.target, node.args = aten.clone.default, (operand,)
    elif node.target is aten.dropout_.default:
        assert isinstance(operand, fx.Node)
        node.replace_all_uses_with(operand)
        graph.erase_node(node)


def _without_cudnn(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """A norm's arguments as the exporter writes them: with all defaults, and False for cuDNN, which nobody reads."""
    defaults = (None, None, 1e-5)
    return (*args[:5], *defaults[len(args) - 2 :], False)


def _rewrite_reshape(graph: fx.Graph, node: fx.Node, operand: fx.Node) -> None:
    """As a view; where strides allow none, as a view of a copy."""
    shape, given = list(node.meta["val"].shape), operand.meta["val"]
    wanted: Any = node.args[1] if node.target is aten.reshape.default else shape
    if _can_view(given, shape):
        node.target, node.args = aten.view.default, (operand, wanted)
        return
    with graph.inserting_before(node):
        copy = graph.call_function(aten.clone.default, (operand,), {"memory_format": torch.contiguous_format})
    copy.meta = {**node.meta, "val": torch.empty(given.shape, dtype=given.dtype, device="meta")}
    node.target, node.args = aten._unsafe_view.default, (copy, shape)


def _can_view(given: torch.Tensor, shape: Sequence[int]) -> bool:
    """Whether a tensor's elements have strides in another shape."""
    if given.is_contiguous():
        return True
    try:
        torch.empty_strided(given.shape, given.stride(), dtype=given.dtype, device="meta").view(shape)
    except RuntimeError:
        return False
    return True


def _rewrite_batch_norm(graph: fx.Graph, node: fx.Node) -> None:
    """As a call of three results, of which the first is taken."""
    if node.args[5]:
        _rewrite_standardisation(graph, node)
        return
    norm = aten._native_batch_norm_legit_no_training.default
    given = (*node.args[:5], *node.args[6:8])
    with graph.inserting_before(node):
        made = graph.call_function(norm, given)
    if node.meta["val"].is_meta:  # of a run: its operands may be on any device
        values = (node.meta["val"], *_saved_statistics(node))
    else:
        values = norm(*(arg.meta["val"] if isinstance(arg, fx.Node) else arg for arg in given))
    made.meta = {**node.meta, "val": values}
    node.target, node.args = operator.getitem, (made, 0)


def _rewrite_standardisation(graph: fx.Graph, node: fx.Node) -> None:
    """A batch norm by the batch's own statistics, as a call of three results, of which the first is taken."""
    norm = aten._native_batch_norm_legit.no_stats
    given = (*node.args[:3], True, *node.args[6:8])
    with graph.inserting_before(node):
        made = graph.call_function(norm, given)
    made.meta = {**node.meta, "val": norm(*(_without_values(arg) for arg in given))}
    node.target, node.args = operator.getitem, (made, 0)


def _without_values(arg: Any) -> Any:
    """An operand's shape on the meta device, if it is a tensor."""
    if not isinstance(arg, fx.Node):
        return arg
    given = arg.meta["val"]
    return torch.empty_strided(given.shape, given.stride(), dtype=given.dtype, device="meta")


def _saved_statistics(node: fx.Node) -> tuple[torch.Tensor, torch.Tensor]:
    """What a batch norm in evaluation mode returns besides its output, as tensors without data."""
    x, weight = (arg.meta["val"] for arg in node.args[:2] if isinstance(arg, fx.Node))
    by_channel, dtype = _statistics(weight.device, x.dtype)  # the input's own device may be `meta`
    first, second = (torch.empty(x.shape[1] if by_channel else 0, dtype=dtype, device="meta") for _ in range(2))
    return first, second


def _statistics(device: torch.device, dtype: torch.dtype) -> tuple[bool, torch.dtype]:
    """Of mean and deviation: whether there is one of each channel, and its dtype; as PyTorch's tracer says.

    The tracer itself is not asked: it would import Dynamo, which takes two seconds.
    """
    wider = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
    return (False, dtype) if device.type == "cpu" else (True, wider.get(dtype, dtype))
