"""From an exported program to one in which no call writes to its operands and none is a composite that hides another.

`ExportedProgram.run_decompositions` does that for any program by tracing it once more, which takes longer than exporting it did
(ResNet-50: 1.0 s after 0.9 s). Most CNNs need rewrites of single calls alone: activations and additions in place, batch norm in
evaluation mode, flatten, reshape, chunk, dropout that drops nothing. Programs of such calls are rewritten here, to the very same
graph.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, Final, cast

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind

aten: Any = torch.ops.aten

_KEPT: Final = frozenset(
    {
        *(getattr(aten, f"adaptive_avg_pool{sides}d").default for sides in (1, 2, 3)),
        *(getattr(aten, f"avg_pool{sides}d").default for sides in (1, 2, 3)),
        *(getattr(aten, f"conv{sides}d").default for sides in (1, 2, 3)),
        *(getattr(aten, f"max_pool{sides}d").default for sides in (1, 2, 3)),
        aten.add.Tensor,
        aten.addcmul.default,
        aten.cat.default,
        aten.clamp_min.default,
        aten.conv2d.padding,
        aten.div.Tensor,
        aten.elu.default,
        aten.gelu.default,
        aten.group_norm.default,
        aten.hardsigmoid.default,
        aten.hardswish.default,
        aten.hardtanh.default,
        aten.layer_norm.default,
        aten.leaky_relu.default,
        aten.linalg_vector_norm.default,
        aten.linear.default,
        aten.matmul.default,
        aten.mean.dim,
        aten.mish.default,
        aten.mul.Tensor,
        aten.pad.default,
        aten.pixel_shuffle.default,
        aten.pow.Tensor_Scalar,
        aten.relu.default,
        aten.scaled_dot_product_attention.default,
        aten.sigmoid.default,
        aten.silu.default,
        aten.softmax.int,
        aten.stack.default,
        aten.sub.Tensor,
        aten.sum.dim_IntList,
        aten.tanh.default,
        aten.upsample_bilinear2d.vec,
        aten.upsample_nearest2d.vec,
    }
)
"""Calls that stay as they are. Each makes a tensor of its own."""

_IN_PLACE: Final = {
    aten.add_.Tensor: aten.add.Tensor,
    aten.div_.Tensor: aten.div.Tensor,
    aten.elu_.default: aten.elu.default,
    aten.hardsigmoid_.default: aten.hardsigmoid.default,
    aten.hardswish_.default: aten.hardswish.default,
    aten.hardtanh_.default: aten.hardtanh.default,
    aten.leaky_relu_.default: aten.leaky_relu.default,
    aten.mish_.default: aten.mish.default,
    aten.mul_.Tensor: aten.mul.Tensor,
    aten.relu_.default: aten.relu.default,
    aten.sigmoid_.default: aten.sigmoid.default,
    aten.silu_.default: aten.silu.default,
    aten.sub_.Tensor: aten.sub.Tensor,
}
"""Calls that write their first operand → what computes the same into a tensor of its own."""

_VIEWS: Final = frozenset(
    {
        aten.expand.default,
        aten.permute.default,
        aten.select.int,
        aten.slice.Tensor,
        aten.squeeze.dim,
        aten.transpose.int,
        aten.unsqueeze.default,
        aten.view.default,
    }
)
"""Calls that stay as they are, and whose result is their operand's memory."""

SPLITS: Final = frozenset({aten.chunk.default, aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int})
"""The same, with several results, which `operator.getitem` takes."""

_RESHAPES: Final = frozenset({aten.flatten.using_ints, aten.reshape.default})
"""Calls whose result is their operand's memory, or a copy where its strides allow no view."""

_MAY_SHARE: Final = frozenset(
    {
        aten.contiguous.default,
        aten.expand_as.default,
        aten.dropout.default,
        aten.dropout_.default,
        operator.getitem,
        *_RESHAPES,
        *_VIEWS,
        *SPLITS,
    }
)
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
    if target in _RESHAPES or target is aten.expand_as.default:
        return isinstance(node.args[0], fx.Node)
    if target is aten.contiguous.default:
        return isinstance(node.args[0], fx.Node) and not node.kwargs and len(node.args) == 1
    if target is operator.getitem:
        return isinstance(node.args[0], fx.Node) and node.args[0].target in SPLITS
    if target is aten.chunk.default:
        return isinstance(node.args[0], fx.Node) and node.args[0].meta["val"].numel() > 0
    if target in (aten.dropout.default, aten.dropout_.default):
        return node.args[2] is False
    return target in _KEPT or target in _IN_PLACE or target in _VIEWS or target in SPLITS


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
    elif node.target in (aten.group_norm.default, aten.layer_norm.default):
        node.args = _without_cudnn(node.args)
    elif node.target in _RESHAPES:
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
