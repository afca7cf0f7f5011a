"""The arguments of conv2d, as torch takes them: checked, each refusal naming its argument, and turned into a problem."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, Final, cast

import torch
from torch.nn.functional import pad

from convoy.engines.torch_operators import DTYPES
from convoy.errors import InputError
from convoy.problem import ConvProblem, Epilogue
from convoy.problem.spec import FLOAT_DTYPES
from convoy.settings import Settings

_NAMES: Final = {DTYPES[name]: name for name in sorted(FLOAT_DTYPES)}

Size = int | Sequence[int]


def check_tensors(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Kinds, ranks and devices; the sizes are checked with the other arguments."""
    for name, tensor, ranks in (("x", x, (3, 4)), ("weight", weight, (4,)), ("bias", bias, (1,))):
        if tensor is None and name == "bias":
            continue
        if not isinstance(tensor, torch.Tensor):
            raise InputError(name, type(tensor).__name__, "a torch.Tensor" + (" or None" if name == "bias" else ""))
        if tensor.layout != torch.strided or tensor.is_nested:
            kind = "a nested tensor" if tensor.is_nested else tensor.layout
            todo = "Convolve its parts." if tensor.is_nested else "Call .to_dense() on it."
            raise InputError(name, kind, "a dense tensor", todo)
        if tensor.dim() not in ranks:
            sides = " or ".join(f"{rank}-D" for rank in ranks)
            raise InputError(name, tuple(tensor.shape), f"a {sides} tensor")
        if tensor.device.type not in ("cpu", "cuda", "meta"):
            raise InputError(name, str(tensor.device), "a tensor on cpu or cuda")
        if tensor.device != x.device:
            raise InputError(name, str(tensor.device), f"a tensor on {x.device}, the device of x")


def check_dtypes(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """One dtype for all, one that convolutions are computed in."""
    if x.dtype not in _NAMES:
        raise InputError("x", x.dtype, "a tensor of float64, float32, float16 or bfloat16")
    for name, tensor in (("x", x), ("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.dtype != x.dtype:
            raise InputError(name, tensor.dtype, f"{x.dtype}, the dtype of x")


def cast_for_autocast(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Under torch.autocast, the tensors in its dtype, as torch's convolution takes them."""
    device = x.device.type
    if device == "meta" or not torch.is_autocast_enabled(device) or x.dtype == torch.float64:
        return x, weight, bias
    dtype = torch.get_autocast_dtype(device)
    return x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def problem_of(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Size,
    padding: Size | str,
    dilation: Size,
    groups: int,
    settings: Settings,
) -> ConvProblem:
    """The problem; raises InputError naming the argument."""
    strides, dilations = _pair("stride", stride, 1), _pair("dilation", dilation, 1)
    if isinstance(groups, (tuple, list)):
        raise InputError("groups", groups, "an integer of at least 1")
    (group_count,) = _integers("groups", groups, 1)
    k, per_group, r, s = weight.shape
    n, c, h, w = x.shape if x.dim() == 4 else (1, *x.shape)
    if not k or not per_group or not r or not s:
        raise InputError("weight", tuple(weight.shape), "sides of at least 1")
    if not c or not h or not w:
        raise InputError("x", tuple(x.shape), "at least one channel and one pixel")
    if k % group_count:
        raise InputError("groups", group_count, f"a divisor of weight's {k} filters")
    if c != per_group * group_count:
        expected = f"{per_group * group_count} channels: groups = {group_count} times weight's {per_group}"
        raise InputError("x", tuple(x.shape), expected)
    if bias is not None and len(bias) != k:
        raise InputError("bias", tuple(bias.shape), f"one value for each of weight's {k} filters")
    pads, extra = _paddings(padding, strides, dilations, (r, s))
    dtype = _NAMES[x.dtype]
    spans = tuple(d * (side - 1) + 1 for d, side in zip(dilations, (r, s), strict=True))
    whole = tuple(side + 2 * p + e for side, p, e in zip((h, w), pads, extra, strict=True))
    if spans[0] > whole[0] or spans[1] > whole[1]:
        raise InputError("weight", (r, s), f"a filter that spans (it spans {spans}) no more than the padded x, {whole}")
    return ConvProblem(
        n=n, c=c, h=h + extra[0], w=w + extra[1], k=k, r=r, s=s,
        pad_h=pads[0], pad_w=pads[1], stride_h=strides[0], stride_w=strides[1],
        dilation_h=dilations[0], dilation_w=dilations[1], groups=group_count,
        layout=layout_of(x), x_dtype=dtype, weight_dtype=dtype, y_dtype=dtype,
        acc_dtype="fp64" if dtype == "fp64" else "fp32", numerics=settings.numerics, epilogue=Epilogue(bias is not None),
    )  # fmt: skip


def layout_of(x: torch.Tensor) -> str:
    """The memory format of x: contiguous where both fit, and for anything in between."""
    if x.dim() == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last):
        return "nhwc"
    return "nchw"


def _integers(name: str, value: object, least: int) -> tuple[int, ...]:
    values: tuple[Any, ...] = tuple(cast("Sequence[Any]", value)) if isinstance(value, (tuple, list)) else (value,)
    try:
        found = tuple(operator.index(v) for v in values if not isinstance(v, bool))
    except TypeError:
        found = ()
    if len(found) != len(values) or any(v < least for v in found):
        raise InputError(
            name,
            cast("object", value),
            f"integers of at least {least}" if len(values) > 1 else f"an integer of at least {least}",
        )
    return found


def _pair(name: str, value: object, least: int) -> tuple[int, int]:
    found = _integers(name, value, least)
    if len(found) not in (1, 2):
        raise InputError(name, value, "one integer, or two: for height and width")
    return found[0], found[-1]


def _paddings(
    padding: Size | str, strides: tuple[int, int], dilations: tuple[int, int], sides: tuple[int, int]
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Padding on both sides, and what `same` adds below and to the right where the total is odd."""
    if not isinstance(padding, str):
        return _pair("padding", padding, 0), (0, 0)
    if padding == "valid":
        return (0, 0), (0, 0)
    if padding != "same":
        raise InputError("padding", padding, "integers, 'valid' or 'same'")
    if strides != (1, 1):
        raise InputError("padding", padding, f"integers or 'valid' where stride is not 1, got stride {strides}")
    totals = tuple(d * (side - 1) for d, side in zip(dilations, sides, strict=True))
    return (totals[0] // 2, totals[1] // 2), (totals[0] % 2, totals[1] % 2)


def pad_odd_same(x: torch.Tensor, problem: ConvProblem) -> torch.Tensor:
    """The batch with the row and the column of zeros that an odd `same` padding adds."""
    down, right = problem.h - x.shape[2], problem.w - x.shape[3]
    return pad(x, (0, right, 0, down)) if down or right else x
