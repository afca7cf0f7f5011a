"""An ONNX file as data: nodes, constants, inputs and outputs, all bounded and checked before anything is computed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from convoy.errors import InputError
from convoy.untrusted import escape_controls, open_file, read_bytes
from convoy.zoo.onnx_model.value import Array, OnnxNode, UnsupportedOnnxError

MOST_FILE_BYTES: Final = 2 << 30
"""Of an .onnx file: protobuf reads no more."""

MOST_DATA_BYTES: Final = 16 << 30
"""Of a file beside it that holds weights."""

MOST_NODES: Final = 100_000

MOST_RANK: Final = 16

DOMAINS: Final = ("", "ai.onnx")


@dataclass(frozen=True, slots=True)
class OnnxGraph:
    """A graph that was read.

    Attributes:
        nodes: in an order in which each reads what earlier ones gave.
        constants: by name.
        inputs: name → sizes; None for a size that may vary.
        outputs: names.
    """

    nodes: tuple[OnnxNode, ...]
    constants: Mapping[str, Array]
    inputs: Mapping[str, tuple[int | None, ...]]
    outputs: tuple[str, ...]


def read_graph(file: Path) -> OnnxGraph:
    """Read a file and the weights that lie beside it.

    Raises:
        InputError: the package `onnx` is missing, or the file is not there, no ONNX model, damaged or too large.
        UnsupportedOnnxError: it holds something other than one graph of ONNX's own operators.
    """
    try:
        import onnx
    except ImportError as error:
        todo = "Install it: pip install onnx."
        raise InputError("model", str(file), "the package onnx, to read an .onnx file", todo) from error
    data = read_bytes(file, MOST_FILE_BYTES, "model")
    try:
        model = onnx.load_model_from_string(data)
        if model.functions:
            from onnx.inliner import inline_local_functions

            model = inline_local_functions(model)
        version = max((entry.version for entry in model.opset_import if entry.domain in DOMAINS), default=0)
        if not version or len(model.graph.node) > MOST_NODES:
            raise ValueError("no version of ONNX's operators" if not version else f"{len(model.graph.node)} nodes")
        return _graph(model.graph, version, file)
    except (UnsupportedOnnxError, InputError):
        raise
    except Exception as error:  # protobuf and NumPy fail in many ways on damaged files
        first = escape_controls((str(error).strip().splitlines() or [type(error).__name__])[0])[:300]
        raise InputError("model", str(file), "a whole ONNX model", f"Reading it failed: {first}") from error


def _graph(graph: Any, version: int, file: Path) -> OnnxGraph:
    constants = {one.name: _array(one, file) for one in graph.initializer}
    if graph.sparse_initializer:
        raise UnsupportedOnnxError("sparse constants")
    nodes: list[OnnxNode] = []
    for one in graph.node:
        if one.domain not in DOMAINS:
            raise UnsupportedOnnxError(f"the operator {one.domain[:60]}.{one.op_type[:60]}")
        attributes = {attribute.name: _attribute(attribute, file) for attribute in one.attribute}
        if one.op_type == "Constant":
            constants[one.output[0]] = _constant(attributes)
            continue
        nodes.append(OnnxNode(one.op_type, version, tuple(one.input), tuple(one.output), attributes))
    inputs = {one.name: _sizes(one) for one in graph.input if one.name not in constants}
    return OnnxGraph(tuple(nodes), constants, inputs, tuple(one.name for one in graph.output))


def _sizes(value: Any) -> tuple[int | None, ...]:
    if value.type.WhichOneof("value") != "tensor_type" or not value.type.tensor_type.HasField("shape"):
        raise UnsupportedOnnxError(f"the input {value.name[:60]} without a shape")
    sizes = value.type.tensor_type.shape.dim
    return tuple(int(size.dim_value) if size.WhichOneof("value") == "dim_value" else None for size in sizes)


def _attribute(attribute: Any, file: Path) -> Any:
    from onnx import AttributeProto, helper

    if attribute.type in (AttributeProto.GRAPH, AttributeProto.GRAPHS):
        raise UnsupportedOnnxError("control flow (If, Loop, Scan)")
    if attribute.type == AttributeProto.TENSOR:
        return _array(attribute.t, file)
    value = helper.get_attribute_value(attribute)
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return list(value) if attribute.type in (AttributeProto.INTS, AttributeProto.FLOATS) else value


def _constant(attributes: Mapping[str, Any]) -> Array:
    """The value of a `Constant` node."""
    kinds = {"value_int": np.int64, "value_ints": np.int64, "value_float": np.float32, "value_floats": np.float32}
    for name, value in attributes.items():
        if name == "value":
            return value
        if name in kinds:
            return np.array(value, dtype=kinds[name])
    raise UnsupportedOnnxError("a constant of text or of sparse values")


def _array(one: Any, file: Path) -> Array:
    """A tensor of the file, or of a file beside it."""
    from onnx import TensorProto, helper, numpy_helper

    sizes = tuple(int(size) for size in one.dims)
    if len(sizes) > MOST_RANK or any(size < 0 for size in sizes):
        raise ValueError(f"the tensor {one.name[:60]} has the sizes {sizes[:MOST_RANK]}")
    if one.data_location != TensorProto.EXTERNAL:
        return np.array(numpy_helper.to_array(one))
    dtype = np.dtype(helper.tensor_dtype_to_np_dtype(one.data_type))
    return _external(one, file, dtype, sizes)


def _external(one: Any, file: Path, dtype: np.dtype[Any], sizes: tuple[int, ...]) -> Array:
    """Bytes of a regular file in the same folder; a name with a folder in it is refused."""
    words = {entry.key: entry.value for entry in one.external_data}
    name = words.get("location", "")
    if not name or Path(name).name != name or name in (".", ".."):
        raise ValueError(f"weights lie in {name[:100]!r}, which is not a file of the same folder")
    count = math.prod(sizes) * dtype.itemsize
    offset, length = int(words.get("offset", 0)), int(words.get("length", count))
    if length != count or offset < 0:
        raise ValueError(f"the tensor {one.name[:60]} has {length} bytes where its sizes need {count}")
    with open_file(file.parent / name, MOST_DATA_BYTES, "model") as opened:
        opened.seek(0, 2)
        if offset + length > opened.tell():
            raise ValueError(f"{name[:100]} ends before the tensor {one.name[:60]}")
        opened.seek(offset)
        data = opened.read(length)
    return np.frombuffer(bytearray(data), dtype).reshape(sizes)
