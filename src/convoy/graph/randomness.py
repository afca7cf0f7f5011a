"""Which nodes draw random numbers. PyTorch runs each by itself and in order, so that a seed gives the same numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from convoy.errors import InputError
from convoy.graph.ir import Graph, Node

RANDOM: Final = frozenset({
    "_cudnn_init_dropout_state", "_cudnn_rnn", "_fused_dropout", "_lstm_mps", "_nested_tensor_softmax_with_shape",
    "_sample_dirichlet", "_standard_gamma", "alpha_dropout", "bernoulli", "binomial", "cauchy", "dropout",
    "exponential", "feature_alpha_dropout", "feature_dropout", "geometric", "gru", "log_normal", "lstm",
    "miopen_rnn", "multinomial", "native_dropout", "normal", "normal_functional", "poisson", "rand", "rand_like",
    "randint", "randint_like", "randn", "randn_like", "random", "randperm", "rnn_relu", "rnn_tanh",
    "rrelu_with_noise", "rrelu_with_noise_functional", "uniform",
})  # fmt: skip
"""Base names of ATen's functional operators that draw, or may draw, random numbers."""

DROPOUT_P_POSITION: Final = {
    "_cudnn_attention_backward": 13,
    "_cudnn_attention_forward": 9,
    "_efficient_attention_forward": 8,
    "_flash_attention_forward": 7,
    "_fused_sdp_choice": 4,
    "_scaled_dot_product_attention_math": 4,
    "_scaled_dot_product_attention_math_for_mps": 4,
    "_scaled_dot_product_cudnn_attention": 5,
    "_scaled_dot_product_cudnn_attention_backward": 13,
    "_scaled_dot_product_efficient_attention": 5,
    "_scaled_dot_product_efficient_attention_backward": 9,
    "_scaled_dot_product_flash_attention": 3,
    "_scaled_dot_product_flash_attention_for_cpu": 3,
    "_scaled_dot_product_fused_attention_overrideable": 4,
    "_triton_scaled_dot_attention": 3,
    "scaled_dot_product_attention": 4,
}
"""Attention operators draw random numbers only with a dropout probability: its position among the arguments."""

RECURRENT_POSITIONS: Final = {
    **{f"{name}.input": (4, 5, 6) for name in ("gru", "lstm", "rnn_relu", "rnn_tanh")},
    **{f"{name}.data": (5, 6, 7) for name in ("gru", "lstm", "rnn_relu", "rnn_tanh")},
    "_cudnn_rnn.default": (9, 11, 12),
}
"""Recurrent operators draw random numbers only in training, for dropout between two layers: the positions of the number of
layers, the dropout probability and the training flag."""


def is_recurrent(node: Node) -> bool:
    """Whether a node is a recurrent layer (LSTM, GRU, RNN), all its time steps in one operator."""
    return node.op.removeprefix("aten.") in RECURRENT_POSITIONS


MEMORY_ORDER: Final = "memory_order"
"""Keyword of a node that draws: the dimensions of its first tensor from the outermost in memory to the innermost, in PyTorch.

PyTorch draws numbers in the order in which that tensor lies in memory, which is no property of a value here.
"""


def memory_order(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...] | None:
    """What `MEMORY_ORDER` says of a tensor that a node draws for; None where nothing need be said.

    Nothing need be said of a tensor in the order of its dimensions, but for images and volumes, which engines have in other
    memory formats; nor of one whose elements share memory.

    Args:
        shape: sizes of the tensor.
        strides: its strides, in elements.
    """
    moving = [dim for dim, side in enumerate(shape) if side > 1]
    if len({strides[dim] for dim in moving} - {0}) < len(moving):
        return None
    order = sorted(range(len(shape)), key=lambda dim: -strides[dim])
    if [dim for dim in order if dim in moving] != moving:
        return tuple(order)
    fits_both_formats = len(shape) < 4 or shape[1] == 1 or all(side == 1 for side in shape[2:])
    return None if fits_both_formats else tuple(range(len(shape)))


def split_memory_order(graph: Graph, node: Node) -> tuple[Node, tuple[int, ...]]:
    """A node as its operator takes it, and its `MEMORY_ORDER`; empty where it has none.

    Raises:
        InputError: an order that does not name each dimension of the node's first argument once.
    """
    order = next((arg for name, arg in node.kwargs if name == MEMORY_ORDER), None)
    if order is None:
        return node, ()
    rank = len(graph.values[next(node.refs())].spec.shape)
    dims = order if isinstance(order, tuple) else ()
    found = tuple(dim for dim in dims if isinstance(dim, int))
    if len(found) != len(dims) or sorted(found) != list(range(rank)):
        raise InputError(MEMORY_ORDER, order, f"each of the {rank} dimensions of {node.name}'s first argument once")
    return replace(node, kwargs=tuple(pair for pair in node.kwargs if pair[0] != MEMORY_ORDER)), found


def draws_random(node: Node) -> bool:
    """Whether a node draws random numbers. A dropout outside training counts as one; capture removes those."""
    name = node.op.split(".")[1] if node.op.startswith("aten.") else ""
    if name in DROPOUT_P_POSITION:
        at = DROPOUT_P_POSITION[name]
        return (node.args[at] if len(node.args) > at else dict(node.kwargs).get("dropout_p", 0.0)) != 0.0
    if is_recurrent(node):
        layers, dropout, train = (node.args[at] for at in RECURRENT_POSITIONS[node.op.removeprefix("aten.")])
        return bool(train) and dropout != 0.0 and layers != 1
    if name == "rrelu":
        return bool(node.args[3] if len(node.args) > 3 else dict(node.kwargs).get("training", False))
    return name in RANDOM
