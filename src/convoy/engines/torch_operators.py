"""PyTorch's counterpart of a graph's names: dtypes, symbols, and the function of each `aten.NAME.OVERLOAD`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Final, cast

import torch

from convoy.engines.group_norm_backward import GROUP_NORM, GROUP_NORM_BACKWARD, group_norm, group_norm_gradients
from convoy.errors import InputError
from convoy.graph.ir import AVG_POOL_BACKWARD, LAYERS

DTYPES: Final[Mapping[str, torch.dtype]] = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "i64": torch.int64,
    "i32": torch.int32,
    "i16": torch.int16,
    "i8": torch.int8,
    "u8": torch.uint8,
    "bool": torch.bool,
}
"""Convoy's name of a dtype → torch's."""

SYMBOLS: Final[Mapping[str, Any]] = {
    **{f"dtype.{name}": dtype for name, dtype in DTYPES.items()},
    "layout.strided": torch.strided,
    "memory_format.nchw": torch.contiguous_format,
    "memory_format.nhwc": torch.channels_last,
    "memory_format.preserve": torch.preserve_format,
}
"""Symbols of arguments, except `DEVICE`."""

DEVICE: Final = "device.inputs"
"""Stands for the device of a call's inputs."""

# torch.* entry points of the same arguments: their argument parser costs about half of what torch.ops' does (1.1 against
# 1.8 µs a call for relu, 1.2 against 2.7 for cat, on one core of a 2-core AVX2 machine).
QUICK: Final[Mapping[str, Callable[..., Any]]] = {
    "aten.add.Tensor": torch.add,
    "aten.addcmul.default": torch.addcmul,
    "aten.cat.default": torch.cat,
    "aten.max_pool2d.default": torch.max_pool2d,
    "aten.mul.Tensor": torch.mul,
    "aten.relu.default": torch.relu,
    "aten.sigmoid.default": torch.sigmoid,
}

# Reshape copies where the memory format allows no view. A graph's views are views of values, not of memory.
_VIEWS: Final[Mapping[str, str]] = {
    "aten.view.default": "aten.reshape.default",
    "aten._unsafe_view.default": "aten.reshape.default",
}


def _is_on_gpu(tensor: torch.Tensor) -> bool:
    """Whether a kernel of PyTorch's would run on a GPU; not while a graph is traced."""
    return type(tensor) is torch.Tensor and tensor.is_cuda


def _average_gradient(
    dy: torch.Tensor, x: torch.Tensor, kernel: Any, stride: Any, padding: Sequence[int], *rest: Any
) -> torch.Tensor:
    """The gradient of an average pooling, in nchw where PyTorch reads wrong windows.

    On a GPU its kernel for channels_last leaves the padding out (pytorch/pytorch#188344, seen with 2.11): wrong gradients, and no
    word of it.
    """
    if any(padding) and _is_on_gpu(dy):
        dy, x = dy.contiguous(), x.contiguous()
    return torch.ops.aten.avg_pool2d_backward.default(dy, x, kernel, stride, padding, *rest)


_MENDED: Final[Mapping[str, Callable[..., Any]]] = {
    AVG_POOL_BACKWARD: _average_gradient,
    GROUP_NORM: group_norm,
    GROUP_NORM_BACKWARD: group_norm_gradients,
}
"""Operators that some PyTorch versions compute wrongly, or for some strides not at all, and the functions that replace them."""

_FILES: Final = frozenset({"from_file", "save"})
"""They open files by name; a graph's text may come from a file itself."""

_STRIDED: Final = frozenset({"as_strided", "as_strided_copy", "as_strided_scatter"})
"""They read memory by strides, so their result would depend on the memory format of their input."""


@cache
def resolve(op: str) -> Callable[..., Any]:
    """The function of `aten.NAME.OVERLOAD`.

    Raises:
        InputError: no such overload, one that writes to its arguments, or one whose result depends on strides.
    """
    op = _VIEWS.get(op, op)
    namespace, name, overload = [*op.split("."), "", ""][:3]
    packet = getattr(torch.ops.aten, name, None) if namespace == "aten" and name.isidentifier() else None
    found = getattr(packet, overload, None) if overload in (packet.overloads() if packet is not None else ()) else None
    if found is None:
        raise InputError("operator", op, f"an ATen overload that PyTorch {torch.__version__} has")
    if found._schema.is_mutable:
        raise InputError("operator", op, "an operator that makes new values, and overwrites none")
    if name in _FILES:
        raise InputError("operator", op, "an operator that opens no files")
    if name in _STRIDED:
        raise InputError("operator", op, "an operator whose result does not depend on its input's strides")
    return cast("Callable[..., Any]", _MENDED.get(op) or QUICK.get(op, found))


def returns_many(op: str) -> bool:
    """Whether an operator gives a sequence of tensors; one such as a split may hold a single one."""
    if op in LAYERS:
        return False
    _, name, overload = _VIEWS.get(op, op).split(".")
    returns = getattr(getattr(torch.ops.aten, name), overload)._schema.returns
    return len(returns) != 1 or str(returns[0].type) != "Tensor"
