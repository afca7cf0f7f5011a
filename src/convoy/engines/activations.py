"""The activations and poolings of an epilogue, by torch's own functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import torch
import torch.nn.functional as F  # noqa: N812 - the field writes F

from convoy.problem import Pool

FUNCTIONS: Final[Mapping[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "none": lambda x: x,
    "relu": torch.relu,
    "relu6": F.relu6,
    "silu": F.silu,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "sigmoid": torch.sigmoid,
    "gelu": F.gelu,
}
"""Name in an epilogue → function."""

IN_PLACE: Final[Mapping[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "none": lambda x: x,
    "relu": torch.relu_,
    "relu6": lambda x: F.relu6(x, inplace=True),
    "silu": lambda x: F.silu(x, inplace=True),
    "hardswish": lambda x: F.hardswish(x, inplace=True),
    "hardsigmoid": lambda x: F.hardsigmoid(x, inplace=True),
    "sigmoid": torch.sigmoid_,
    "gelu": lambda x: x.copy_(F.gelu(x)),
}
"""The same, overwriting its argument."""


def activate(x: torch.Tensor, activation: str) -> torch.Tensor:
    """The activation of an epilogue; `gelu` is the exact form."""
    return FUNCTIONS[activation](x)


def pool2d(x: torch.Tensor, pool: Pool | None) -> torch.Tensor:
    """The pooling of an epilogue on [n, k, p, q] or [k, p, q]; x itself where there is none."""
    if pool is None:
        return x
    window, stride, padding = (
        (pool.window_h, pool.window_w),
        (pool.stride_h, pool.stride_w),
        (pool.pad_h, pool.pad_w),
    )
    if pool.kind == "max":
        return F.max_pool2d(x, window, stride, padding, ceil_mode=pool.ceil_mode)
    return F.avg_pool2d(x, window, stride, padding, pool.ceil_mode, pool.count_include_pad)


def finish(y: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None, activation: str) -> torch.Tensor:
    """An epilogue by separate ATen calls, overwriting y: y = activation(y + bias + residual)."""
    if bias is not None:
        y.add_(bias.reshape(-1, *[1] * (y.dim() - 2)))
    if residual is not None:
        y.add_(residual)
    return IN_PLACE[activation](y)
