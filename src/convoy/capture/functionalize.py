"""From an exported program to one in which no call writes to its operands and none is a composite that hides another.

`ExportedProgram.run_decompositions` does that for any program by tracing it once more, which takes longer than exporting it did
(ResNet-50: 1.0 s after 0.9 s). Most CNNs need four rewrites of single calls alone: activations and additions in place, batch norm
in evaluation mode, flatten, dropout that drops nothing. Programs of such calls are rewritten here, to the very same graph.
"""

from __future__ import annotations

import operator
from typing import Any, Final, cast

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind

aten: Any = torch.ops.aten

_KEPT: Final = frozenset(
    {
        aten.adaptive_avg_pool2d.default,
        aten.add.Tensor,
        aten.avg_pool2d.default,
        aten.cat.default,
        aten.conv2d.default,
        aten.hardsigmoid.default,
        aten.hardswish.default,
        aten.hardtanh.default,
        aten.linear.default,
        aten.max_pool2d.default,
        aten.mean.dim,
        aten.mul.Tensor,
        aten.relu.default,
        aten.sigmoid.default,
        aten.silu.default,
    }
)
"""Calls that stay as they are. Each makes a tensor of its own."""

_IN_PLACE: Final = {
    aten.add_.Tensor: aten.add.Tensor,
    aten.hardsigmoid_.default: aten.hardsigmoid.default,
    aten.hardswish_.default: aten.hardswish.default,
    aten.hardtanh_.default: aten.hardtanh.default,
    aten.mul_.Tensor: aten.mul.Tensor,
    aten.relu_.default: aten.relu.default,
    aten.sigmoid_.default: aten.sigmoid.default,
    aten.silu_.default: aten.silu.default,
}
"""Calls that write their first operand → what computes the same into a tensor of its own."""

_MAY_SHARE: Final = frozenset({aten.dropout.default, aten.dropout_.default, aten.flatten.using_ints})
"""Calls whose result may be their operand's memory."""


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


class SimpleCalls:
    """Accepts calls in order: those above, where what is written is a tensor that a call made and nobody holds a view of."""

    def __init__(self) -> None:
        self._maker: dict[fx.Node, fx.Node] = {}  # of the tensor that a call returns; none for a view
        self._viewed: set[fx.Node] = set()

    def accepts(self, node: fx.Node) -> bool:
        """Whether the next call is such a one. Its operands' `meta["val"]` is read, its own is not."""
        if node.op != "call_function" or not _is_known(node):
            return False
        maker, operand = self._maker, node.args[0] if isinstance(node.args[0], fx.Node) else node
        if node.target in _MAY_SHARE:
            owner = maker.get(operand)
            self._viewed.add(operand if owner is None else owner)
        elif node.target not in _IN_PLACE:
            maker[node] = node
        elif operand in maker and maker[operand] not in self._viewed and _keeps_dtype(node):
            maker[node] = maker[operand]
        else:
            return False
        return True


def _is_known(node: fx.Node) -> bool:
    """Whether it is a call of those above that computes what it does in evaluation mode."""
    target = node.target
    if target is aten.batch_norm.default:
        return all(isinstance(arg, fx.Node) for arg in node.args[:5]) and node.args[5] is False
    if target is aten.flatten.using_ints:  # of anything else it is a copy
        return isinstance(node.args[0], fx.Node) and node.args[0].meta["val"].is_contiguous()
    if target in (aten.dropout.default, aten.dropout_.default):
        return node.args[2] is False
    return target in _KEPT or target in _IN_PLACE


def _keeps_dtype(node: fx.Node) -> bool:
    """Whether the functional call's result has the dtype of what was written: every operand has it."""
    dtypes = {arg.meta["val"].dtype for arg in node.all_input_nodes}
    return len(dtypes) == 1 and all(dtype.is_floating_point for dtype in dtypes)


def _rewrite(graph: fx.Graph, node: fx.Node, place: dict[fx.Node, int]) -> None:
    """Put in a call's place what computes the same without a write; `place` has the calls as they were, in order."""
    operand = node.args[0]
    if node.target in _IN_PLACE:
        assert isinstance(operand, fx.Node)
        node.target = _IN_PLACE[node.target]
        operand.replace_all_uses_with(node, lambda user: place.get(user, 0) > place[node])
    elif node.target is aten.batch_norm.default:
        _rewrite_batch_norm(graph, node)
    elif node.target is aten.flatten.using_ints:
        node.target, node.args = aten.view.default, (operand, list(node.meta["val"].shape))
    elif node.target is aten.dropout.default:
        node.target, node.args = aten.clone.default, (operand,)
    elif node.target is aten.dropout_.default:
        assert isinstance(operand, fx.Node)
        node.replace_all_uses_with(operand)
        graph.erase_node(node)


def _rewrite_batch_norm(graph: fx.Graph, node: fx.Node) -> None:
    """As a call of three results, of which the first is taken."""
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
