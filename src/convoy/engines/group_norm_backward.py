"""GroupNorm for any strides, and its backward pass without PyTorch's crash on a CPU: a channels_last input without a gradient.

PyTorch's kernel for channels_last writes the input's gradient whether it was asked for or not, through a null pointer
(`known_defects`: torch-group-norm-backward-channels-last). Asked for it, it is right.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from convoy.graph.ir import Graph

GROUP_NORM: Final = "aten.native_group_norm.default"
GROUP_NORM_BACKWARD: Final = "aten.native_group_norm_backward.default"

_BACKWARD: Final = torch.ops.aten.native_group_norm_backward.default


def _format(x: torch.Tensor) -> torch.memory_format:
    """The memory format in which a tensor is dense, or contiguous where it has gaps.

    A model's `group_norm` copies an input with gaps, and a graph drops copies. PyTorch's operator refuses such an input, and its
    gradient reads wrong elements of one, as it does of a `dy` in another format than x.
    """
    images = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    return torch.channels_last if images else torch.contiguous_format


def group_norm(x: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`native_group_norm` of an input with any strides."""
    return torch.ops.aten.native_group_norm.default(x.contiguous(memory_format=_format(x)), *rest)


def group_norm_gradients(dy: torch.Tensor, x: torch.Tensor, *rest: Any) -> tuple[torch.Tensor | None, ...]:
    """`native_group_norm_backward` for any strides; the input's gradient is dropped where the last argument says so."""
    *sizes, wanted = rest
    dy, x = (tensor.contiguous(memory_format=_format(x)) for tensor in (dy, x))
    if wanted[0] or not any(wanted) or x.device.type != "cpu":
        return _BACKWARD(dy, x, *sizes, wanted)
    return None, *_BACKWARD(dy, x, *sizes, [True, *wanted[1:]])[1:]


def without_input_gradient(graph: Graph) -> int:
    """How many group norms of a graph have a backward pass for weight and bias alone, or one whose `dx` nobody reads."""
    return sum(
        node.op == GROUP_NORM_BACKWARD and (not node.outputs[0] or not node.args[-1][0])  # pyright: ignore[reportIndexIssue, reportOptionalSubscript]
        for node in graph.nodes
    )


def guarded(graph: Graph | None, device: str) -> AbstractContextManager[object]:
    """A context in which PyTorch's own run of a graph, autograd's backward pass included, does not crash there."""
    return (
        GroupNormGuard() if device == "cpu" and graph is not None and without_input_gradient(graph) else nullcontext()
    )


class GroupNormGuard(TorchDispatchMode):
    """Runs `group_norm_gradients` in the place of the operator."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Run an operator."""
        del types
        return group_norm_gradients(*args) if func is _BACKWARD else func(*args, **(kwargs or {}))
