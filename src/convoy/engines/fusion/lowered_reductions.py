"""ATen operators that sum or compare elements: means, poolings, softmax, layer norm and RMS norm."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from convoy.engines.fusion.lowered_elementwise import constant, elementwise
from convoy.engines.fusion.lowered_movement import reshaped
from convoy.engines.fusion.lowered_poolings import IMAGES, VOLUMES, pooled
from convoy.engines.fusion.node_call import NEEDED, NodeCall, dimension, integers
from convoy.engines.fusion.tensors import NotFusibleError, Reduced, Tensor, broadcast
from convoy.graph.ir import Arg, Symbol

Rule = Callable[[NodeCall], Tensor]


def reduced(tensor: Tensor, dims: Sequence[int], kind: str) -> Tensor:
    """A sum or maximum, with sides of 1."""
    found = tuple(sorted(dim for dim in set(dims) if tensor.shape[dim] > 1))
    if not found:
        return tensor
    sides = tuple(1 if dim in found else side for dim, side in enumerate(tensor.shape))
    return Reduced(sides, tensor, found, "max" if kind == "max" else "sum")


def mean(tensor: Tensor, dims: Sequence[int]) -> Tensor:
    """A mean, with sides of 1."""
    total = reduced(tensor, dims, "sum")
    count = math.prod(tensor.shape[dim] for dim in set(dims))
    return total if count == 1 else elementwise("mul", total, constant(1.0 / count, total.shape))


def _dims(arg: Arg, rank: int) -> list[int]:
    found = [dimension(dim, rank) for dim in integers(arg)] if arg is not None else []
    return found or list(range(rank))


def _reduction(call: NodeCall) -> Tensor:
    x, dims, _, dtype = call.read(x=NEEDED, dims=None, keepdim=False, dtype=None)
    if dtype is not None and not isinstance(dtype, Symbol):
        raise NotFusibleError(f"does not know this form of {call.node.op}")
    tensor = call.tensor(x)
    places = _dims(dims, len(tensor.shape))
    if call.operator == "mean":
        found = mean(tensor, places)
    else:
        found = reduced(tensor, places, "max" if call.operator == "amax" else "sum")
    return reshaped(found, call.spec.shape)


def _whole(call: NodeCall) -> Tensor:
    (x,) = call.read(x=NEEDED)
    tensor = call.tensor(x)
    places = range(len(tensor.shape))
    return reshaped(mean(tensor, places) if call.operator == "mean" else reduced(tensor, places, "sum"), ())


def _pool(call: NodeCall) -> Tensor:
    return pooled(call, mean)


def _norm(call: NodeCall) -> Tensor:
    """The root of the sum of squares."""
    x, order, dims, _, dtype = call.read(x=NEEDED, order=2, dims=None, keepdim=False, dtype=None)
    if order != 2 or (dtype is not None and not isinstance(dtype, Symbol)):
        raise NotFusibleError(f"does not know this form of {call.node.op}")
    tensor = call.tensor(x)
    squares = reduced(elementwise("square", tensor), _dims(dims, len(tensor.shape)), "sum")
    return reshaped(elementwise("sqrt", squares), call.spec.shape)


def _softmax(call: NodeCall) -> Tensor:
    x, dim, extra = call.read(x=NEEDED, dim=NEEDED, extra=None)
    if isinstance(extra, Symbol) or extra not in (None, False):
        raise NotFusibleError(f"does not know this form of {call.node.op}")
    tensor = call.tensor(x)
    place = dimension(dim, len(tensor.shape))
    shifted = elementwise("sub", tensor, broadcast(reduced(tensor, (place,), "max"), tensor.shape))
    power = elementwise("exp", shifted)
    total = reduced(power, (place,), "sum")
    if "log" in call.operator:
        return elementwise("sub", shifted, broadcast(elementwise("log", total), tensor.shape))
    return elementwise("div", power, broadcast(total, tensor.shape))


def _scaled(call: NodeCall, tensor: Tensor, weight: Arg, bias: Arg) -> Tensor:
    """With weight and bias, of the shape of the last dimensions."""
    for arg, function in ((weight, "mul"), (bias, "add")):
        if arg is not None:
            tensor = elementwise(function, tensor, broadcast(call.tensor(arg), tensor.shape))
    return tensor


def _layer_norm(call: NodeCall) -> Tensor:
    """As `Elementwise` of two reductions: the mean first, then the squares of the differences from it."""
    if call.operator == "layer_norm":
        x, sides, weight, bias, eps, _ = call.read(
            x=NEEDED, sides=NEEDED, weight=None, bias=None, eps=1e-5, cudnn_enable=True
        )
    else:
        x, sides, weight, bias, eps = call.read(x=NEEDED, sides=NEEDED, weight=None, bias=None, eps=1e-5)
    tensor = call.tensor(x)
    rank = len(tensor.shape)
    dims = range(rank - len(integers(sides)), rank)
    centred = elementwise("sub", tensor, broadcast(mean(tensor, dims), tensor.shape))
    spread = mean(elementwise("square", centred), dims)
    factor = elementwise("rsqrt", elementwise("add", spread, constant(eps, spread.shape)))
    return _scaled(call, elementwise("mul", centred, broadcast(factor, tensor.shape)), weight, bias)


def _rms_norm(call: NodeCall) -> Tensor:
    x, sides, weight, eps = call.read(x=NEEDED, sides=NEEDED, weight=None, eps=None)
    tensor = call.tensor(x)
    rank = len(tensor.shape)
    least = {"fp16": 2.0**-10, "bf16": 2.0**-7, "fp32": 2.0**-23}[call.dtype(x)] if eps is None else eps
    spread = mean(elementwise("square", tensor), range(rank - len(integers(sides)), rank))
    factor = elementwise("rsqrt", elementwise("add", spread, constant(least, spread.shape)))
    return _scaled(call, elementwise("mul", tensor, broadcast(factor, tensor.shape)), weight, None)


REDUCTIONS: Final[Mapping[str, Rule]] = {
    **dict.fromkeys(("mean.dim", "sum.dim_IntList", "amax.default"), _reduction),
    **dict.fromkeys(("mean.default", "sum.default"), _whole),
    **dict.fromkeys((*IMAGES, *VOLUMES), _pool),
    **dict.fromkeys(("softmax.int", "_softmax.default", "log_softmax.int", "_log_softmax.default"), _softmax),
    **dict.fromkeys(("layer_norm", "native_layer_norm"), _layer_norm),
    "rms_norm": _rms_norm,
    "linalg_vector_norm": _norm,
}
