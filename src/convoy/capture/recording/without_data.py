"""Tensors without data, and the results of the commonest operators on them: shapes and strides alone, on no device.

PyTorch's own functions for the meta device are right too, but some are written in Python, and import Dynamo at their first call.
That takes two seconds; so calls whose result is plain are answered here, and PyTorch is asked about the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn

aten: Any = torch.ops.aten


def without_data(value: Any) -> Any:
    """A tensor of the same shape, strides and dtype on the meta device; any other value as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def tensors_without_data(model: nn.Module) -> dict[int, torch.Tensor]:
    """By `id` of each parameter and buffer, one without data."""
    made: dict[int, torch.Tensor] = {
        id(each): nn.Parameter(without_data(each), requires_grad=each.requires_grad) for each in model.parameters()
    }
    return made | {id(each): without_data(each) for each in model.buffers()}


def result_without_data(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of an operator for tensors without data, in evaluation mode.

    Raises:
        Exception: PyTorch refuses the call.
    """
    shaped = None if kwargs else _known().get(func)
    made = None if shaped is None else shaped(*args)
    return func(*args, **kwargs) if made is None else made


Shaped = Callable[..., torch.Tensor | None]
"""Computes an operator's result. None: PyTorch computes it, and its error names a wrong operand."""


@cache
def _known() -> dict[Any, Shaped]:
    unary = ("hardsigmoid", "hardswish", "hardtanh", "relu", "sigmoid", "silu")
    found: dict[Any, Shaped] = {getattr(aten, name).default: _like for name in unary}
    found |= {getattr(aten, f"{name}_").default: _same for name in unary}
    return found | {
        aten.adaptive_avg_pool2d.default: _adaptive_pool,
        aten.add.Tensor: _binary,
        aten.mul.Tensor: _binary,
        aten.add_.Tensor: _binary_in_place,
        aten.mul_.Tensor: _binary_in_place,
        aten.batch_norm.default: _batch_norm,
        aten.cat.default: _concatenated,
        aten.conv2d.default: _convolution,
        aten.linear.default: _linear,
        aten.mean.dim: _mean,
    }


def _like(x: torch.Tensor, *_: object) -> torch.Tensor | None:
    return torch.empty_like(x) if x.is_floating_point() else None


def _same(x: torch.Tensor, *_: object) -> torch.Tensor | None:
    return x if x.is_floating_point() else None


def _in_format(shape: Sequence[int], dtype: torch.dtype, *like: torch.Tensor) -> torch.Tensor | None:
    """A tensor in the memory format that others have; None if they differ, or have none."""
    for memory_format in (torch.contiguous_format, torch.channels_last):
        dense = memory_format is torch.contiguous_format or len(shape) == 4
        if dense and all(each.is_contiguous(memory_format=memory_format) for each in like):
            return torch.empty(tuple(shape), dtype=dtype, device="meta", memory_format=memory_format)
    return None


def _binary(x: torch.Tensor, y: Any, *_: object) -> torch.Tensor | None:
    """Sums and products; of operands that are spread, the one with the result's shape gives the strides."""
    if not isinstance(y, torch.Tensor):
        return torch.empty_like(x) if x.is_floating_point() and isinstance(y, (bool, int, float)) else None
    if x.dtype != y.dtype:
        return None
    if x.shape != y.shape and x.dim() != y.dim():
        return None
    shape = tuple(map(max, x.shape, y.shape))
    if any(size not in (1, most) for each in (x, y) for size, most in zip(each.shape, shape, strict=True)):
        return None
    whole = [each for each in (x, y) if each.shape == shape]
    return torch.empty_like(whole[0]) if whole else None


def _binary_in_place(x: torch.Tensor, y: Any, *_: object) -> torch.Tensor | None:
    made = _binary(x, y)
    return x if made is not None and made.shape == x.shape else None


def _batch_norm(x: torch.Tensor, *more: Any) -> torch.Tensor | None:
    parameters = more[:4]
    fits = all(isinstance(each, torch.Tensor) and each.shape == x.shape[1:2] for each in parameters)
    return torch.empty_like(x) if fits and x.dim() > 1 else None


def _convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Sequence[int] = (1, 1),
    padding: Sequence[int] = (0, 0),
    dilation: Sequence[int] = (1, 1),
    groups: int = 1,
) -> torch.Tensor | None:
    per_axis = [tuple(each) * 2 if len(each) == 1 else tuple(each) for each in (stride, padding, dilation)]
    fits = x.dim() == weight.dim() == 4 and x.dtype == weight.dtype and x.shape[1] == weight.shape[1] * groups
    if not fits or weight.shape[0] % groups or (bias is not None and bias.shape != weight.shape[:1]):
        return None
    sizes = [
        (size + 2 * pad - spread * (taps - 1) - 1) // step + 1
        for size, taps, step, pad, spread in zip(x.shape[2:], weight.shape[2:], *per_axis, strict=True)
    ]
    last = any(
        each.is_contiguous(memory_format=torch.channels_last) for each in (x, weight) if not each.is_contiguous()
    )
    made = torch.channels_last if last else torch.contiguous_format
    shape = (x.shape[0], weight.shape[0], *sizes)
    return torch.empty(shape, dtype=x.dtype, device="meta", memory_format=made) if min(sizes) > 0 else None


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor | None:
    fits = x.dim() > 1 and weight.dim() == 2 and x.dtype == weight.dtype and x.shape[-1] == weight.shape[1]
    if not fits or (bias is not None and bias.shape != weight.shape[:1]):
        return None
    return torch.empty((*x.shape[:-1], weight.shape[0]), dtype=x.dtype, device="meta")


def _concatenated(tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor | None:
    first = tensors[0]
    rank = first.dim()
    axis = dim % max(rank, 1)
    alike = all(each.dtype == first.dtype and each.dim() == rank > 0 for each in tensors)
    sides = {(*each.shape[:axis], *each.shape[axis + 1 :]) for each in tensors}
    if not alike or len(sides) > 1:
        return None
    shape = [*first.shape]
    shape[axis] = sum(each.shape[axis] for each in tensors)
    return _in_format(shape, first.dtype, *tensors)


def _adaptive_pool(x: torch.Tensor, size: Sequence[int]) -> torch.Tensor | None:
    if x.dim() != 4 or not x.is_floating_point() or min(*size, *x.shape) < 1:
        return None
    return _in_format((*x.shape[:2], *size), x.dtype, x)


def _mean(x: torch.Tensor, dims: Sequence[int] | None, keepdim: bool = False, *more: object) -> torch.Tensor | None:
    if more or not dims or not x.is_floating_point() or min(dims) < -x.dim() or max(dims) >= x.dim():
        return None
    taken = {dim % x.dim() for dim in dims}
    kept = [1 if axis in taken else size for axis, size in enumerate(x.shape) if keepdim or axis not in taken]
    return torch.empty(kept, dtype=x.dtype, device="meta")
