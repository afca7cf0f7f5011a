"""Calls of operators on the slots of a graph that is being run, and what their arguments hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from convoy.engines.torch_operators import DEVICE
from convoy.graph.ir import Arg, Ref, Symbol

Slots = list[Any]
"""The values of a graph while it runs, by the number that `compile_graph` gave each."""


def unary(function: Callable[..., Any], slot: int, rest: list[Any], kwargs: dict[str, Any]) -> Callable[[Slots], Any]:
    """The call of a function on one slot and on constants."""
    if not rest and not kwargs:
        return lambda slots: function(slots[slot])
    if not kwargs:
        return lambda slots: function(slots[slot], *rest)
    return lambda slots: function(slots[slot], *rest, **kwargs)


def binary(function: Callable[..., Any], first: int, second: int) -> Callable[[Slots], Any]:
    """The call of a function on two slots."""
    return lambda slots: function(slots[first], slots[second])


def widened(call: Callable[[Slots], Any]) -> Callable[[Slots], Any]:
    """The same call with its floating-point results converted to float64."""

    def wide(value: Any) -> Any:
        return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    def call_widened(slots: Slots) -> Any:
        made = call(slots)
        return [wide(part) for part in cast("Sequence[Any]", made)] if isinstance(made, (tuple, list)) else wide(made)

    return call_widened


def in_memory_order(call: Callable[..., Any], order: Sequence[int]) -> Callable[..., Any]:
    """The same operator with its first tensor laid out as PyTorch has it (`convoy.graph.randomness.MEMORY_ORDER`)."""
    inverse = [order.index(dim) for dim in range(len(order))]

    def laid_out(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return call(tensor.permute(*order).contiguous().permute(*inverse), *args, **kwargs)

    return laid_out


def is_fused_attention(op: str) -> bool:
    """Whether an operator is one that PyTorch's attention runs only on tensors whose last dimension is contiguous."""
    name = op.split(".")[1] if op.startswith("aten.") else ""
    return name.startswith("_scaled_dot_product_") or name.endswith(("_attention_forward", "_attention_backward"))


def with_contiguous_rows(call: Callable[..., Any]) -> Callable[..., Any]:
    """The same operator on copies of the 4-D arguments whose last dimension is not contiguous.

    The CPU's kernel reads foreign memory there; a GPU's raise an error. PyTorch looks at strides before it chooses a kernel. The
    graph holds its choice, and its values have other strides.
    """

    def row(value: Any) -> Any:
        strided = isinstance(value, torch.Tensor) and value.dim() == 4 and value.stride(-1) != 1
        return value.contiguous() if strided else value

    return lambda *args, **kwargs: call(*map(row, args), **{name: row(value) for name, value in kwargs.items()})


def has_refs(arg: Arg) -> bool:
    """Whether an argument is or contains a value of the graph."""
    return isinstance(arg, Ref) or (isinstance(arg, tuple) and any(map(has_refs, arg)))


def mentions_device(arg: Arg) -> bool:
    """Whether an argument is the graph's device, which is only known when the graph runs."""
    return isinstance(arg, Symbol) and arg.text == DEVICE
