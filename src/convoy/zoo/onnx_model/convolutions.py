"""Convolutions, poolings and normalisations of ONNX by PyTorch's operators."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch.nn import functional

from convoy.zoo.onnx_model.value import Inputs, OnnxNode, Operator, UnsupportedOnnxError, optional, tensor

_CONV = {3: functional.conv1d, 4: functional.conv2d, 5: functional.conv3d}
_TRANSPOSED = {3: functional.conv_transpose1d, 4: functional.conv_transpose2d, 5: functional.conv_transpose3d}
_MAX_POOL = {3: functional.max_pool1d, 4: functional.max_pool2d, 5: functional.max_pool3d}


def _pads(
    node: OnnxNode, x: torch.Tensor, kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int]
) -> list[int]:
    """Begin and end of each spatial side, as ONNX lists them: all begins, then all ends."""
    sides = len(kernel)
    mode = node.get("auto_pad", "NOTSET")
    if mode in ("NOTSET", ""):
        return [int(pad) for pad in node.get("pads", [0] * 2 * sides)]
    if mode == "VALID":
        return [0] * 2 * sides
    begins: list[int] = []
    ends: list[int] = []
    for side in range(sides):
        size, reach = int(x.shape[2 + side]), (kernel[side] - 1) * dilations[side] + 1
        total = max(0, (math.ceil(size / strides[side]) - 1) * strides[side] + reach - size)
        small, large = total // 2, total - total // 2
        begins.append(small if mode == "SAME_UPPER" else large)
        ends.append(large if mode == "SAME_UPPER" else small)
    return [*begins, *ends]


def _padded(x: torch.Tensor, pads: Sequence[int], value: float = 0.0) -> tuple[torch.Tensor, list[int]]:
    """The tensor and the symmetric padding that is left for the operator; what is not symmetric is padded here."""
    half = len(pads) // 2
    begins, ends = pads[:half], pads[half:]
    if list(begins) == list(ends):
        return x, list(begins)
    around = [pad for begin, end in zip(reversed(begins), reversed(ends), strict=True) for pad in (begin, end)]
    return functional.pad(x, around, value=value), [0] * half


def _sides(node: OnnxNode, kernel: Sequence[int]) -> tuple[list[int], list[int]]:
    ones = [1] * len(kernel)
    return list(node.get("strides", ones)), list(node.get("dilations", ones))


def conv(node: OnnxNode, inputs: Inputs) -> torch.Tensor:
    """`Conv` in one to three dimensions."""
    x, weight = tensor(inputs[0]), tensor(inputs[1])
    bias = None if optional(inputs, 2) is None else tensor(inputs[2])
    kernel = list(weight.shape[2:])
    strides, dilations = _sides(node, kernel)
    x, pads = _padded(x, _pads(node, x, kernel, strides, dilations))
    return _CONV[x.dim()](x, weight, bias, strides, pads, dilations, int(node.get("group", 1)))


def conv_transpose(node: OnnxNode, inputs: Inputs) -> torch.Tensor:
    """`ConvTranspose` in one to three dimensions; pads that are not symmetric are cut off the result."""
    x, weight = tensor(inputs[0]), tensor(inputs[1])
    bias = None if optional(inputs, 2) is None else tensor(inputs[2])
    kernel = list(weight.shape[2:])
    strides, dilations = _sides(node, kernel)
    if node.get("auto_pad", "NOTSET") not in ("NOTSET", "") or node.get("output_shape"):
        raise UnsupportedOnnxError("ConvTranspose with auto_pad or output_shape")
    pads = list(node.get("pads", [0] * 2 * len(kernel)))
    more = list(node.get("output_padding", [0] * len(kernel)))
    begins, ends = pads[: len(kernel)], pads[len(kernel) :]
    groups = int(node.get("group", 1))
    run = _TRANSPOSED[x.dim()]
    if begins == ends:
        return run(x, weight, bias, strides, begins, more, groups, dilations)
    whole = run(x, weight, bias, strides, 0, more, groups, dilations)
    for side, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        whole = whole.narrow(2 + side, begin, whole.shape[2 + side] - begin - end)
    return whole


def max_pool(node: OnnxNode, inputs: Inputs) -> torch.Tensor:
    """`MaxPool`; indices are not given."""
    if len([name for name in node.outputs if name]) > 1:
        raise UnsupportedOnnxError("MaxPool with indices")
    x, kernel = tensor(inputs[0]), list(node.get("kernel_shape"))
    strides, dilations = _sides(node, kernel)
    x, pads = _padded(x, _pads(node, x, kernel, strides, dilations), -math.inf)
    if any(2 * pad > size for pad, size in zip(pads, kernel, strict=True)):  # more than PyTorch's own padding takes
        x, pads = _padded(
            functional.pad(x, [p for pad in reversed(pads) for p in (pad, pad)], value=-math.inf), [0] * 2 * len(pads)
        )
    return _MAX_POOL[x.dim()](x, kernel, strides, pads, dilations, bool(node.get("ceil_mode", 0)))


def average_pool(node: OnnxNode, inputs: Inputs) -> torch.Tensor:
    """`AveragePool`, padding counted or not."""
    x, kernel = tensor(inputs[0]), list(node.get("kernel_shape"))
    strides, dilations = _sides(node, kernel)
    if any(dilation != 1 for dilation in dilations):
        raise UnsupportedOnnxError("AveragePool with dilations")
    pads = _pads(node, x, kernel, strides, dilations)
    half, counted, ceil = len(kernel), bool(node.get("count_include_pad", 0)), bool(node.get("ceil_mode", 0))
    pool: Any = {3: functional.avg_pool1d, 4: functional.avg_pool2d, 5: functional.avg_pool3d}[x.dim()]
    if pads[:half] == pads[half:] and all(2 * pad <= size for pad, size in zip(pads, kernel, strict=False)):
        return pool(x, kernel, strides, pads[:half], ceil, counted)
    if ceil:
        raise UnsupportedOnnxError("AveragePool with ceil_mode and pads that are not symmetric")
    padded, _ = _padded(x, pads)
    if counted:
        return pool(padded, kernel, strides)
    ones, _ = _padded(torch.ones_like(x[:1, :1]), pads)
    return pool(padded, kernel, strides) / pool(ones, kernel, strides)


def global_pool(node: OnnxNode, inputs: Inputs) -> torch.Tensor:
    """`GlobalAveragePool` and `GlobalMaxPool`."""
    x = tensor(inputs[0])
    sides = list(range(2, x.dim()))
    return x.mean(sides, keepdim=True) if node.operator == "GlobalAveragePool" else x.amax(sides, keepdim=True)


def batch_norm(node: OnnxNode, inputs: Inputs) -> torch.Tensor:
    """`BatchNormalization` as in inference."""
    if node.get("training_mode", 0):
        raise UnsupportedOnnxError("BatchNormalization in training mode: export the model in evaluation mode")
    x, scale, bias, mean, variance = (tensor(value) for value in inputs[:5])
    return functional.batch_norm(x, mean, variance, scale, bias, False, 0.0, float(node.get("epsilon", 1e-5)))


def instance_norm(node: OnnxNode, inputs: Inputs) -> torch.Tensor:
    """`InstanceNormalization`."""
    x, scale, bias = (tensor(value) for value in inputs[:3])
    return functional.instance_norm(x, weight=scale, bias=bias, eps=float(node.get("epsilon", 1e-5)))


def group_norm(node: OnnxNode, inputs: Inputs) -> torch.Tensor:
    """`GroupNormalization`; scale and bias are for channels since version 21 of the operators, for groups before."""
    x, scale, bias = (tensor(value) for value in inputs[:3])
    groups = int(node.get("num_groups"))
    if scale.shape[0] != x.shape[1]:
        scale, bias = (value.repeat_interleave(x.shape[1] // groups) for value in (scale, bias))
    return functional.group_norm(x, groups, scale, bias, float(node.get("epsilon", 1e-5)))


def layer_norm(node: OnnxNode, inputs: Inputs) -> torch.Tensor:
    """`LayerNormalization`; mean and deviation are not given."""
    x, scale = tensor(inputs[0]), tensor(inputs[1])
    bias = None if optional(inputs, 2) is None else tensor(inputs[2])
    axis = int(node.get("axis", -1)) % x.dim()
    return functional.layer_norm(x, x.shape[axis:], scale, bias, float(node.get("epsilon", 1e-5)))


def local_response_norm(node: OnnxNode, inputs: Inputs) -> torch.Tensor:
    """`LRN`."""
    size, alpha = int(node.get("size")), float(node.get("alpha", 1e-4))
    return functional.local_response_norm(
        tensor(inputs[0]), size, alpha, float(node.get("beta", 0.75)), float(node.get("bias", 1.0))
    )


CONVOLUTIONS: Final[dict[str, Operator]] = {
    "Conv": conv,
    "ConvTranspose": conv_transpose,
    "MaxPool": max_pool,
    "AveragePool": average_pool,
    "GlobalAveragePool": global_pool,
    "GlobalMaxPool": global_pool,
    "BatchNormalization": batch_norm,
    "InstanceNormalization": instance_norm,
    "GroupNormalization": group_norm,
    "LayerNormalization": layer_norm,
    "LRN": local_response_norm,
}
"""ONNX's operator → its function."""
