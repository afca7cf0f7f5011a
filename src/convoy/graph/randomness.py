"""Which nodes draw random numbers. PyTorch runs each by itself and in order, so that a seed gives the same numbers."""

from __future__ import annotations

from typing import Final

from convoy.graph.ir import Node

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
