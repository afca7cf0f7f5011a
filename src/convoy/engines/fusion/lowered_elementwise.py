"""Elementwise ATen operators, and those of one constant for each channel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from convoy.engines.fusion.node_call import NEEDED, NodeCall, dimension, numeric
from convoy.engines.fusion.operators import BACKWARD, BINARY, NUMBERS, SAME, UNARY
from convoy.engines.fusion.tensors import Elementwise, NotFusibleError, Reshaped, Tensor, broadcast
from convoy.graph.ir import Arg, Ref, Symbol

Rule = Callable[[NodeCall], Tensor]


def elementwise(function: str, *args: Tensor, numbers: tuple[float, ...] = ()) -> Elementwise:
    """A function of values of one shape."""
    return Elementwise(args[0].shape, function, args, numbers)


def constant(value: Arg, shape: tuple[int, ...]) -> Tensor:
    """A number everywhere."""
    return Elementwise(shape, "constant", (), (numeric(value),))


def rounded(tensor: Tensor, dtype: str) -> Tensor:
    """A value as a dtype holds it."""
    return elementwise(f"round_{dtype}", tensor) if dtype in ("fp16", "bf16") else tensor


def _unary(call: NodeCall) -> Tensor:
    (x,) = call.read(x=NEEDED)
    return elementwise(call.operator, call.fitted(x))


def _operand(call: NodeCall, arg: Arg) -> Tensor:
    return call.fitted(arg) if isinstance(arg, Ref) else constant(arg, call.spec.shape)


def _binary(call: NodeCall) -> Tensor:
    first, second = call.read(x=NEEDED, y=NEEDED)
    return elementwise(call.operator, _operand(call, first), _operand(call, second))


def _sum(call: NodeCall) -> Tensor:
    """`add`, `sub` and `rsub`, whose second operand has a factor."""
    first, second, alpha = call.read(x=NEEDED, y=NEEDED, alpha=1)
    a, b = _operand(call, first), _operand(call, second)
    if alpha != 1:
        b = elementwise("mul", b, constant(alpha, b.shape))
    if call.operator == "rsub":
        a, b = b, a
    return elementwise("add" if call.operator == "add" else "sub", a, b)


def _with_numbers(call: NodeCall) -> Tensor:
    names = NUMBERS[call.operator]
    x, *values = call.read(x=NEEDED, **dict(names))
    return elementwise(call.operator, call.fitted(x), numbers=tuple(map(numeric, values)))


_MORE: Final[Mapping[str, Mapping[str, Arg]]] = {
    "leaky_relu_backward": {"result": False},
    "gelu_backward": {"approximate": "none"},
}
"""Arguments of gradients that have only one known value."""


def _backward(call: NodeCall) -> Tensor:
    """A gradient, from dy and the values that the forward pass kept."""
    names = BACKWARD[call.operator]
    extra = _MORE.get(call.operator, {})
    dy, x, *values = call.read(dy=NEEDED, x=NEEDED, **dict(names), **extra)
    if extra and values.pop() not in (False, "none"):
        raise NotFusibleError(f"does not know this form of {call.node.op}")
    return elementwise(call.operator, call.fitted(dy), call.fitted(x), numbers=tuple(map(numeric, values)))


def _clamp(call: NodeCall) -> Tensor:
    names = {"clamp_min": ("min",), "clamp_max": ("max",)}.get(call.operator, ("min", "max"))
    x, *ends = call.read(x=NEEDED, **dict.fromkeys(names))
    found = call.fitted(x)
    for name, end in zip(names, ends, strict=True):
        if end is not None:
            found = elementwise(f"at_{'least' if name == 'min' else 'most'}", found, numbers=(numeric(end),))
    return found


def _gelu(call: NodeCall) -> Tensor:
    x, approximate = call.read(x=NEEDED, approximate="none")
    return elementwise("gelu_tanh" if approximate == "tanh" else "gelu", call.fitted(x))


def _power(call: NodeCall) -> Tensor:
    x, exponent = call.read(x=NEEDED, exponent=NEEDED)
    value, base = numeric(exponent), call.fitted(x)
    named = {2.0: "square", 0.5: "sqrt", -0.5: "rsqrt", -1.0: "reciprocal", 3.0: "cube"}
    return elementwise(named[value], base) if value in named else elementwise("pow", base, numbers=(value,))


def _cast(call: NodeCall) -> Tensor:
    names = {"_to_copy": ("dtype", "layout", "device", "pin_memory", "non_blocking", "memory_format")}
    others = names.get(call.operator, ("dtype", "non_blocking", "copy", "memory_format"))
    x, dtype, *_ = call.read(x=NEEDED, **dict.fromkeys(others))
    if dtype is not None and not isinstance(dtype, Symbol):
        raise NotFusibleError(f"does not know this form of {call.node.op}")
    before, after = call.dtype(x), call.spec.dtype
    if after not in ("fp16", "bf16", "fp32") or before not in ("fp16", "bf16", "fp32", "bool"):
        raise NotFusibleError(f"casts among fp16, bf16 and fp32, got {before} to {after}")
    return call.tensor(x) if before in (after, "bool") else rounded(call.tensor(x), after)


def _same(call: NodeCall) -> Tensor:
    x, _ = call.read(x=NEEDED, memory_format=None)
    return call.tensor(x)


def _dropout(call: NodeCall) -> Tensor:
    x, _, train = call.read(x=NEEDED, p=0.5, train=NEEDED)
    if train is not False:
        raise NotFusibleError("draws no random numbers")
    return call.tensor(x)


def _where(call: NodeCall) -> Tensor:
    condition, a, b = call.read(condition=NEEDED, x=NEEDED, y=NEEDED)
    return elementwise("where", call.fitted(condition), _operand(call, a), _operand(call, b))


def _masked_fill(call: NodeCall) -> Tensor:
    x, mask, value = call.read(x=NEEDED, mask=NEEDED, value=NEEDED)
    return elementwise("where", call.fitted(mask), _operand(call, value), call.fitted(x))


def _addcmul(call: NodeCall) -> Tensor:
    x, a, b, value = call.read(x=NEEDED, a=NEEDED, b=NEEDED, value=1)
    product = elementwise("mul", call.fitted(a), call.fitted(b))
    if value != 1:
        product = elementwise("mul", product, constant(value, product.shape))
    return elementwise("add", call.fitted(x), product)


def per_channel(call: NodeCall, arg: Arg, shape: tuple[int, ...]) -> Tensor | None:
    """A value of one number for each channel, along the second dimension of a shape; None where there is none."""
    if arg is None:
        return None
    tensor = call.tensor(arg)
    sides = (1, shape[1], *(1 for _ in shape[2:]))
    return broadcast(Reshaped(sides, tensor), shape)


def _batch_norm(call: NodeCall) -> Tensor:
    """(x - mean) * (rsqrt(var + eps) * weight) + bias, with stored statistics."""
    if call.operator == "batch_norm":
        x, weight, bias, mean, var, training, _, eps, _ = call.read(
            x=NEEDED, weight=None, bias=None, mean=None, var=None, training=NEEDED, momentum=0, eps=NEEDED, cudnn=None
        )
    else:
        x, weight, bias, mean, var, _, eps = call.read(
            x=NEEDED, weight=None, bias=None, mean=None, var=None, momentum=0, eps=NEEDED
        )
        training = False
    shape = call.spec.shape
    centre, spread = per_channel(call, mean, shape), per_channel(call, var, shape)
    if training is not False or centre is None or spread is None:
        raise NotFusibleError("computes batch norms with stored statistics, not with the batch's own")
    factor: Tensor = elementwise("rsqrt", elementwise("add", spread, constant(eps, shape)))
    if (scale := per_channel(call, weight, shape)) is not None:
        factor = elementwise("mul", factor, scale)
    found = elementwise("mul", elementwise("sub", call.fitted(x), centre), factor)
    shift = per_channel(call, bias, shape)
    return found if shift is None else elementwise("add", found, shift)


def _prelu(call: NodeCall) -> Tensor:
    x, weight = call.read(x=NEEDED, weight=NEEDED)
    tensor, slope = call.fitted(x), call.tensor(weight)
    wide = per_channel(call, weight, call.spec.shape) if len(slope.shape) == 1 else call.fitted(weight)
    assert wide is not None
    return elementwise("prelu", tensor, wide)


def _fill(call: NodeCall, value: float) -> Tensor:
    return constant(value, call.spec.shape)


def _glu(call: NodeCall) -> Tensor:
    from convoy.engines.fusion.tensors import Sliced

    x, dim = call.read(x=NEEDED, dim=-1)
    tensor, shape = call.tensor(x), call.spec.shape
    place = dimension(dim, len(shape))
    first, second = (Sliced(shape, tensor, place, start) for start in (0, shape[place]))
    return elementwise("mul", first, elementwise("sigmoid", second))


ELEMENTWISE: Final[Mapping[str, Rule]] = {
    **dict.fromkeys(UNARY, _unary),
    **dict.fromkeys(BINARY, _binary),
    **dict.fromkeys(("add", "sub", "rsub"), _sum),
    **dict.fromkeys(NUMBERS, _with_numbers),
    **dict.fromkeys(BACKWARD, _backward),
    **dict.fromkeys(("clamp", "clamp_min", "clamp_max"), _clamp),
    **dict.fromkeys(SAME, _same),
    **dict.fromkeys(("_to_copy", "to"), _cast),
    **dict.fromkeys(("batch_norm", "_native_batch_norm_legit_no_training"), _batch_norm),
    "gelu": _gelu,
    "pow.Tensor_Scalar": _power,
    "dropout": _dropout,
    "feature_dropout": _dropout,
    "where.self": _where,
    "masked_fill": _masked_fill,
    "addcmul": _addcmul,
    "prelu": _prelu,
    "_prelu_kernel": _prelu,
    "glu": _glu,
    "zeros_like": partial(_fill, value=0.0),
    "ones_like": partial(_fill, value=1.0),
}
