"""Tensors without data: PyTorch computes their shapes and strides alone, on no device."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def without_data(value: Any) -> Any:
    """A tensor of the same shape, strides and dtype on the meta device; any other value as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def give_up_data(model: nn.Module) -> None:
    """Put tensors without data in the place of a model's parameters and buffers."""
    made: dict[int, Any] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                twin = made.setdefault(
                    id(parameter), nn.Parameter(without_data(parameter), requires_grad=parameter.requires_grad)
                )
                module._parameters[name] = twin
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = made.setdefault(id(buffer), without_data(buffer))
