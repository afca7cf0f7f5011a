"""Operators on small arrays that are known while an ONNX graph is read: chains that compute a shape, an axis, a factor."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from convoy.zoo.onnx_model.value import Array, Constant, Inputs, OnnxNode, UnsupportedOnnxError, Value

MOST_VALUES: Final = 4096
"""Of an array that is computed with on the host: shapes and factors are small."""

HOST_DTYPES: Final = {
    1: np.float32, 2: np.uint8, 3: np.int8, 5: np.int16, 6: np.int32, 7: np.int64, 9: np.bool_, 10: np.float16, 11: np.float64,
}  # fmt: skip
"""The numbers of `TensorProto.DataType`."""


def is_host(value: Value | None) -> bool:
    """Whether a value is a small array, or left out."""
    if value is None:
        return True
    if isinstance(value, Constant):
        return value.array.size <= MOST_VALUES
    return isinstance(value, np.ndarray) and value.size <= MOST_VALUES


def compute(node: OnnxNode, inputs: Inputs) -> Array:
    """The output of a node all of whose inputs are small arrays.

    Raises:
        KeyError: there is no such operator for arrays.
        UnsupportedOnnxError: the result is not small.
    """
    values = [value.array if isinstance(value, Constant) else value for value in inputs]
    found = np.asarray(_HOST[node.operator](node, values))
    if found.size > MOST_VALUES:
        raise UnsupportedOnnxError(f"{node.operator} of constants with {found.size} values")
    return found


def _axes(node: OnnxNode, values: list[Any]) -> tuple[int, ...] | None:
    axes = node.get("axes") if node.get("axes") is not None else (values[1] if len(values) > 1 else None)
    return None if axes is None else tuple(int(axis) for axis in np.asarray(axes).reshape(-1))


def _reshape(_node: OnnxNode, values: list[Any]) -> Array:
    sizes = [values[0].shape[at] if size == 0 else int(size) for at, size in enumerate(values[1].reshape(-1))]
    return values[0].reshape(sizes)


def _slice(node: OnnxNode, values: list[Any]) -> Array:
    x = values[0]
    if node.get("starts") is not None:
        starts, ends, axes, steps = list(node.get("starts")), list(node.get("ends")), node.get("axes"), None
    else:
        starts, ends = values[1].reshape(-1).tolist(), values[2].reshape(-1).tolist()
        axes = values[3].reshape(-1).tolist() if len(values) > 3 and values[3] is not None else None
        steps = values[4].reshape(-1).tolist() if len(values) > 4 and values[4] is not None else None
    where: list[Any] = [slice(None)] * x.ndim
    for at, axis in enumerate(axes if axes is not None else range(len(starts))):
        where[int(axis) % x.ndim] = slice(starts[at], ends[at], 1 if steps is None else steps[at])
    return x[tuple(where)]


def _unsqueeze(node: OnnxNode, values: list[Any]) -> Array:
    axes = _axes(node, values) or ()
    return np.expand_dims(values[0], axes)


def _divide(_node: OnnxNode, values: list[Any]) -> Array:
    left, right = values[0], values[1]
    if np.issubdtype(left.dtype, np.integer):
        return (np.sign(left) * np.sign(right) * (np.abs(left) // np.abs(right))).astype(left.dtype)
    return left / right


def _fill(node: OnnxNode, values: list[Any]) -> Array:
    sizes = [int(size) for size in values[0].reshape(-1)]
    if int(np.prod(sizes, dtype=object)) > MOST_VALUES:
        raise KeyError(node.operator)
    value = node.get("value")
    filler = np.zeros(1, np.float32) if value is None else np.asarray(value)
    return np.full(sizes, filler.reshape(-1)[0], filler.dtype)


def _range(_node: OnnxNode, values: list[Any]) -> Array:
    start, limit, delta = (value.reshape(()).item() for value in values)
    if delta == 0 or (limit - start) / delta > MOST_VALUES:
        raise UnsupportedOnnxError("Range of many values")
    return np.array(
        [start + delta * at for at in range(max(0, math.ceil((limit - start) / delta)))], dtype=values[0].dtype
    )


def _pair(run: Callable[[Any, Any], Any]) -> Callable[[OnnxNode, list[Any]], Any]:
    return lambda _node, values: run(values[0], values[1])


def _one(run: Callable[[Any], Any]) -> Callable[[OnnxNode, list[Any]], Any]:
    return lambda _node, values: run(values[0])


_HOST: Final[dict[str, Callable[[OnnxNode, list[Any]], Any]]] = {
    "Add": _pair(np.add), "Sub": _pair(np.subtract), "Mul": _pair(np.multiply), "Div": _divide, "Mod": _pair(np.mod),
    "Max": _pair(np.maximum), "Min": _pair(np.minimum), "Pow": _pair(np.power), "Equal": _pair(np.equal),
    "Greater": _pair(np.greater), "Less": _pair(np.less), "And": _pair(np.logical_and), "Or": _pair(np.logical_or),
    "Not": _one(np.logical_not), "Neg": _one(np.negative), "Abs": _one(np.abs), "Floor": _one(np.floor), "Ceil": _one(np.ceil),
    "Sqrt": _one(np.sqrt), "Identity": _one(np.asarray), "Shape": lambda node, values: _shape(node, values[0]),
    "Where": lambda _node, values: np.where(values[0], values[1], values[2]),
    "Cast": lambda node, values: values[0].astype(HOST_DTYPES[int(node.get("to"))]),
    "Concat": lambda node, values: np.concatenate(values, int(node.get("axis"))),
    "Gather": lambda node, values: np.take(values[0], values[1].astype(np.int64), int(node.get("axis", 0))),
    "Reshape": _reshape, "Slice": _slice, "Unsqueeze": _unsqueeze, "Range": _range, "ConstantOfShape": _fill,
    "Squeeze": lambda node, values: np.squeeze(values[0], _axes(node, values)),
    "ReduceProd": lambda node, values: np.prod(values[0], axis=_axes(node, values), keepdims=bool(node.get("keepdims", 1))),
    "Transpose": lambda node, values: np.transpose(values[0], node.get("perm")),
}  # fmt: skip
"""ONNX's operator → what it computes with arrays."""


def _shape(node: OnnxNode, value: Array) -> Array:
    end = node.get("end")
    return np.array(value.shape[int(node.get("start", 0)) : None if end is None else int(end)], dtype=np.int64)
