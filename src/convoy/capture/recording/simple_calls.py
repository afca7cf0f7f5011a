"""Calls of a graph that need no tracing to become calls without writes: rewriting them one by one gives the same graph."""

from __future__ import annotations

import operator
from typing import Any, Final

import torch
from torch import fx

aten: Any = torch.ops.aten

KEPT: Final = frozenset(
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

IN_PLACE: Final = {
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

VIEWS: Final = frozenset(
    {
        aten.alias.default,
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

RESHAPES: Final = frozenset({aten.flatten.using_ints, aten.reshape.default, aten.reshape_as.default})
"""Calls whose result is their operand's memory, or a copy where its strides allow no view."""

MAY_SHARE: Final = frozenset(
    {
        aten.contiguous.default,
        aten.expand_as.default,
        aten.dropout.default,
        aten.dropout_.default,
        operator.getitem,
        *RESHAPES,
        *VIEWS,
        *SPLITS,
    }
)
"""Calls whose result may be their operand's memory."""


class SimpleCalls:
    """Accepts the calls above, in order. A call in place must write a tensor that another call made and that has no view."""

    def __init__(self) -> None:
        self._maker: dict[fx.Node, fx.Node] = {}  # of the tensor that a call returns; none for a view
        self._viewed: set[fx.Node] = set()

    def accepts(self, node: fx.Node) -> bool:
        """Whether the next call is such a one. Its operands' `meta["val"]` is read, its own is not."""
        if node.op != "call_function" or not _is_known(node):
            return False
        maker, operand = self._maker, node.args[0] if isinstance(node.args[0], fx.Node) else node
        if node.target in MAY_SHARE:
            owner = maker.get(operand)
            self._viewed.add(operand if owner is None else owner)
        elif node.target not in IN_PLACE:
            maker[node] = node
        elif operand in maker and maker[operand] not in self._viewed and _keeps_dtype(node):
            maker[node] = maker[operand]
        else:
            return False
        return True


def _is_known(node: fx.Node) -> bool:
    """Whether it is a call of those above, with arguments as in evaluation mode."""
    target = node.target
    if target is aten.batch_norm.default:
        return _is_plain_batch_norm(node)
    if target in RESHAPES or target is aten.expand_as.default:
        return isinstance(node.args[0], fx.Node)
    if target is aten.contiguous.default:
        return isinstance(node.args[0], fx.Node) and not node.kwargs and len(node.args) == 1
    if target is operator.getitem:
        return isinstance(node.args[0], fx.Node) and node.args[0].target in SPLITS
    if target is aten.chunk.default:
        return isinstance(node.args[0], fx.Node) and node.args[0].meta["val"].numel() > 0
    if target in (aten.dropout.default, aten.dropout_.default):
        return node.args[2] is False
    return target in KEPT or target in IN_PLACE or target in VIEWS or target in SPLITS


def _is_plain_batch_norm(node: fx.Node) -> bool:
    """In evaluation mode with all four tensors, or of the batch without running statistics, as weights are standardised."""
    given = [isinstance(arg, fx.Node) for arg in node.args[:5]]
    if node.args[5] is False:
        return all(given)
    return given == [True, given[1], given[2], False, False]


def _keeps_dtype(node: fx.Node) -> bool:
    """Whether all operands have one floating-point dtype, so that the functional call's result has it too."""
    dtypes = {arg.meta["val"].dtype for arg in node.all_input_nodes}
    return len(dtypes) == 1 and all(dtype.is_floating_point for dtype in dtypes)
