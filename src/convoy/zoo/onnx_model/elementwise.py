"""Element-wise operators, products and reductions of ONNX by PyTorch's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Final

import torch
from torch.nn import functional

from convoy.zoo.onnx_model.value import Constant, Inputs, OnnxNode, Operator, array, axes_of, optional, tensor


def _unary(run: Callable[[torch.Tensor], torch.Tensor]) -> Operator:
    return lambda _node, inputs: run(tensor(inputs[0]))


def _folded(run: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Operator:
    """An operator of two or more inputs, from the left."""
    return lambda _node, inputs: functools.reduce(run, (tensor(value) for value in inputs))


def _divide(_node: OnnxNode, inputs: Inputs) -> torch.Tensor:
    """`Div`: integers are divided towards zero."""
    left, right = tensor(inputs[0]), tensor(inputs[1])
    whole = not left.is_floating_point() and not right.is_floating_point()
    return torch.div(left, right, rounding_mode="trunc") if whole else left / right


def _bound(inputs: Inputs, index: int, node: OnnxNode, name: str) -> float | None:
    """A bound of `Clip`: an attribute in old files, else an input."""
    if node.get(name) is not None:
        return float(node.get(name))
    value = optional(inputs, index)
    return None if value is None else float(array(value, "a bound of Clip").reshape(-1)[0])


def _clip(node: OnnxNode, inputs: Inputs) -> torch.Tensor:
    low, high = _bound(inputs, 1, node, "min"), _bound(inputs, 2, node, "max")
    x = tensor(inputs[0])
    if low is None and high is None:
        return x
    if (low, high) == (0.0, 6.0):
        return functional.relu6(x)
    return torch.clamp(x, low, high)


def _prelu(_node: OnnxNode, inputs: Inputs) -> torch.Tensor:
    x, slope = tensor(inputs[0]), tensor(inputs[1])
    return torch.where(x < 0, x * slope, x)


def _hard_sigmoid(node: OnnxNode, inputs: Inputs) -> torch.Tensor:
    alpha, beta, x = float(node.get("alpha", 0.2)), float(node.get("beta", 0.5)), tensor(inputs[0])
    if abs(alpha - 1 / 6) < 1e-6 and beta == 0.5:
        return functional.hardsigmoid(x)
    return torch.clamp(alpha * x + beta, 0.0, 1.0)


def _softmax(node: OnnxNode, inputs: Inputs) -> torch.Tensor:
    """`Softmax` and `LogSoftmax`: before version 13 over all axes from `axis` on."""
    run = functional.softmax if node.operator == "Softmax" else functional.log_softmax
    x = tensor(inputs[0])
    if node.version >= 13:
        return run(x, int(node.get("axis", -1)))
    axis = int(node.get("axis", 1)) % x.dim()
    return run(x.flatten(axis), axis).reshape(x.shape)


def _gemm(node: OnnxNode, inputs: Inputs) -> torch.Tensor:
    a, b, c = tensor(inputs[0]), tensor(inputs[1]), optional(inputs, 2)
    alpha, beta = float(node.get("alpha", 1.0)), float(node.get("beta", 1.0))
    a = a.t() if node.get("transA", 0) else a
    if node.get("transB", 0) and alpha == 1.0 and (c is None or (beta == 1.0 and tensor(c).dim() == 1)):
        return functional.linear(a, b, None if c is None else tensor(c))
    product = alpha * (a @ (b.t() if node.get("transB", 0) else b))
    return product if c is None else product + beta * tensor(c)


def _gelu(node: OnnxNode, inputs: Inputs) -> torch.Tensor:
    return functional.gelu(tensor(inputs[0]), approximate=str(node.get("approximate", "none")))


_REDUCTIONS: Final[dict[str, Callable[[torch.Tensor, list[int], bool], torch.Tensor]]] = {
    "ReduceMean": lambda x, axes, keep: x.mean(axes, keepdim=keep),
    "ReduceSum": lambda x, axes, keep: x.sum(axes, keepdim=keep),
    "ReduceMax": lambda x, axes, keep: x.amax(axes, keepdim=keep),
    "ReduceMin": lambda x, axes, keep: x.amin(axes, keepdim=keep),
    "ReduceL2": lambda x, axes, keep: x.square().sum(axes, keepdim=keep).sqrt(),
    "ReduceSumSquare": lambda x, axes, keep: x.square().sum(axes, keepdim=keep),
}


def _reduce(node: OnnxNode, inputs: Inputs) -> torch.Tensor:
    x, axes = tensor(inputs[0]), axes_of(node, inputs)
    if not axes:
        if node.get("noop_with_empty_axes", 0):
            return x
        axes = list(range(x.dim()))
    return _REDUCTIONS[node.operator](x, axes, bool(node.get("keepdims", 1)))


def _arg(node: OnnxNode, inputs: Inputs) -> torch.Tensor:
    x, axis, keep = tensor(inputs[0]), int(node.get("axis", 0)), bool(node.get("keepdims", 1))
    return torch.argmax(x, axis, keep) if node.operator == "ArgMax" else torch.argmin(x, axis, keep)


def _where(_node: OnnxNode, inputs: Inputs) -> torch.Tensor:
    return torch.where(*(tensor(value) for value in inputs[:3]))  # pyright: ignore[reportUnknownVariableType] - torch annotates no arg-reduction


ONNX_DTYPES: Final = {
    1: torch.float32, 2: torch.uint8, 3: torch.int8, 5: torch.int16, 6: torch.int32, 7: torch.int64, 9: torch.bool,
    10: torch.float16, 11: torch.float64, 16: torch.bfloat16,
}  # fmt: skip
"""The numbers of `TensorProto.DataType`."""


def _cast(node: OnnxNode, inputs: Inputs) -> torch.Tensor:
    """`Cast`; fp32 means the type that the module computes in where its input has that already."""
    x, wanted = tensor(inputs[0]), ONNX_DTYPES[int(node.get("to"))]
    return x if wanted == torch.float32 and x.is_floating_point() else x.to(wanted)


def _dropout(node: OnnxNode, inputs: Inputs) -> torch.Tensor:
    del node
    return tensor(inputs[0])


def _power(_node: OnnxNode, inputs: Inputs) -> torch.Tensor:
    exponent = inputs[1]
    if isinstance(exponent, Constant) and exponent.array.size == 1 and float(exponent.array.reshape(-1)[0]) == 2.0:
        return tensor(inputs[0]).square()
    return torch.pow(tensor(inputs[0]), tensor(exponent))


def _scaled(run: Callable[..., torch.Tensor], **defaults: float) -> Operator:
    """An activation with numbers of ONNX's names."""

    def compute(node: OnnxNode, inputs: Inputs) -> torch.Tensor:
        return run(tensor(inputs[0]), *(float(node.get(name, value)) for name, value in defaults.items()))

    return compute


ELEMENTWISE: Final[dict[str, Operator]] = {
    "Relu": _unary(functional.relu), "Sigmoid": _unary(torch.sigmoid), "Tanh": _unary(torch.tanh), "Erf": _unary(torch.erf),
    "Sqrt": _unary(torch.sqrt), "Reciprocal": _unary(torch.reciprocal), "Exp": _unary(torch.exp), "Log": _unary(torch.log),
    "Neg": _unary(torch.neg), "Abs": _unary(torch.abs), "Floor": _unary(torch.floor), "Ceil": _unary(torch.ceil),
    "Round": _unary(torch.round), "Not": _unary(torch.logical_not), "Softplus": _unary(functional.softplus),
    "Softsign": _unary(functional.softsign), "Mish": _unary(functional.mish), "HardSwish": _unary(functional.hardswish),
    "Sin": _unary(torch.sin), "Cos": _unary(torch.cos), "Sign": _unary(torch.sign), "Identity": _dropout, "Dropout": _dropout,
    "LeakyRelu": _scaled(functional.leaky_relu, alpha=0.01), "Elu": _scaled(functional.elu, alpha=1.0),
    "Celu": _scaled(functional.celu, alpha=1.0), "Selu": _unary(functional.selu), "HardSigmoid": _hard_sigmoid,
    "PRelu": _prelu, "Clip": _clip, "Gelu": _gelu, "Softmax": _softmax, "LogSoftmax": _softmax, "Gemm": _gemm,
    "MatMul": lambda _node, inputs: torch.matmul(tensor(inputs[0]), tensor(inputs[1])),
    "Add": _folded(torch.add), "Sub": _folded(torch.sub), "Mul": _folded(torch.mul), "Div": _divide, "Pow": _power,
    "Max": _folded(torch.maximum), "Min": _folded(torch.minimum), "Sum": _folded(torch.add),
    "Equal": _folded(torch.eq), "Greater": _folded(torch.gt), "Less": _folded(torch.lt),
    "GreaterOrEqual": _folded(torch.ge), "LessOrEqual": _folded(torch.le), "And": _folded(torch.logical_and),
    "Or": _folded(torch.logical_or), "Where": _where, "Cast": _cast, "ArgMax": _arg, "ArgMin": _arg,
    **dict.fromkeys(_REDUCTIONS, _reduce),
}  # fmt: skip
"""ONNX's operator → its function."""
