"""Each operator of ONNX against ONNX Runtime, and a net from the file to the outputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

from onnx import TensorProto, helper, numpy_helper  # noqa: E402

from convoy.zoo.onnx_model.module import OPERATORS, OnnxModule  # noqa: E402
from convoy.zoo.onnx_model.read import read_graph  # noqa: E402

X = (2, 4, 6, 7)
"""Sizes of the input where a case names no other."""

RNG = np.random.default_rng(0)


def floats(*sizes: int) -> np.ndarray[Any, Any]:
    return RNG.standard_normal(sizes).astype(np.float32)


def ints(*values: int) -> np.ndarray[Any, Any]:
    return np.array(values, np.int64)


Case = tuple[str, dict[str, Any], list[Any], dict[str, Any]]


def case(
    operator: str, *more: Any, x: tuple[int, ...] = X, outputs: int = 1, opset: int = 20, **attributes: Any
) -> Any:
    """A node that reads the input and constants."""
    marks = {"x": x, "outputs": outputs, "opset": opset}
    words = ", ".join(f"{name}={value}" for name, value in attributes.items())
    return pytest.param(operator, attributes, list(more), marks, id=f"{operator} {words} {opset}".strip())


CONV = floats(6, 4, 3, 3)
CASES = [
    case("Conv", CONV, floats(6), pads=[1, 1, 1, 1]),
    case("Conv", CONV, pads=[0, 1, 2, 1], strides=[2, 1], dilations=[1, 2]),
    case("Conv", CONV, auto_pad="SAME_UPPER", strides=[2, 2]),
    case("Conv", CONV, auto_pad="SAME_LOWER", strides=[2, 2]),
    case("Conv", CONV, auto_pad="VALID"),
    case("Conv", floats(4, 1, 3, 3), group=4),
    case("Conv", floats(6, 4, 3), x=(2, 4, 9)),
    case("Conv", floats(3, 2, 2, 2, 2), x=(1, 2, 4, 5, 4)),
    case("ConvTranspose", floats(4, 3, 3, 3), floats(3), strides=[2, 2], pads=[1, 1, 1, 1], output_padding=[1, 1]),
    case("ConvTranspose", floats(4, 3, 3, 3), pads=[0, 1, 1, 0]),
    case("MaxPool", kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1]),
    case("MaxPool", kernel_shape=[3, 2], strides=[2, 2], pads=[0, 0, 1, 1], ceil_mode=0),
    case("MaxPool", kernel_shape=[2, 2], strides=[2, 2], ceil_mode=1),
    case("MaxPool", kernel_shape=[2, 2], dilations=[2, 2]),
    case("AveragePool", kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1]),
    case("AveragePool", kernel_shape=[3, 3], pads=[1, 1, 1, 1], count_include_pad=1),
    case("AveragePool", kernel_shape=[2, 2], pads=[0, 0, 1, 1]),
    case("AveragePool", kernel_shape=[2, 2], pads=[0, 0, 1, 1], count_include_pad=1),
    case("GlobalAveragePool"), case("GlobalMaxPool"),
    case("BatchNormalization", floats(4), floats(4), floats(4), np.abs(floats(4)), epsilon=1e-3),
    case("InstanceNormalization", floats(4), floats(4)),
    case("GroupNormalization", floats(4), floats(4), num_groups=2, opset=21),
    case("LayerNormalization", floats(7), floats(7), axis=-1), case("LayerNormalization", floats(6, 7), axis=2),
    case("LRN", size=3, alpha=0.1),
    case("Relu"), case("Sigmoid"), case("Tanh"), case("Erf"), case("Softplus"), case("Softsign"), case("Mish"),
    case("HardSwish"), case("HardSigmoid"), case("HardSigmoid", alpha=1 / 6, beta=0.5), case("LeakyRelu", alpha=0.2),
    case("Elu", alpha=0.5), case("Selu"), case("Celu", alpha=2.0), case("Gelu"), case("Gelu", approximate="tanh"),
    case("PRelu", floats(4, 1, 1)), case("Clip", np.float32(-0.5), np.float32(0.5)), case("Clip", min=0.0, max=6.0, opset=9),
    case("Softmax", axis=1), case("Softmax", axis=1, opset=11), case("LogSoftmax", axis=-1), case("Dropout"), case("Identity"),
    case("Gemm", floats(5, 7), floats(5), x=(3, 7), transB=1), case("Gemm", floats(3, 5), x=(3, 7), transA=1, alpha=0.5),
    case("MatMul", floats(7, 5)), case("Add", floats(4, 1, 1)), case("Sub", floats(7)), case("Mul", floats(1)),
    case("Div", np.float32(3)), case("Pow", np.float32(2)), case("Max", floats(7)), case("Min", floats(7), floats(1)),
    case("Sum", floats(7)), case("Abs"), case("Neg"), case("Exp"), case("Sign"), case("Floor"), case("Ceil"), case("Round"),
    case("ReduceMean", ints(2, 3), keepdims=0), case("ReduceMean", axes=[2, 3], opset=13), case("ReduceSum", ints(1)),
    case("ReduceMax", ints(-1), keepdims=0), case("ReduceMin", ints(0, 2)), case("ReduceL2", ints(1)), case("ReduceSumSquare"),
    case("Flatten"), case("Flatten", axis=2), case("Flatten", axis=-1), case("Flatten", axis=0),
    case("Reshape", ints(0, -1, 7)), case("Transpose", perm=[0, 2, 3, 1]), case("Transpose"),
    case("Squeeze", ints(1), x=(2, 1, 3)), case("Squeeze", axes=[1], x=(2, 1, 3), opset=11), case("Unsqueeze", ints(0, 3)),
    case("Concat", floats(2, 3, 6, 7), axis=1), case("Split", ints(1, 3), outputs=2, axis=1),
    case("Split", outputs=2, axis=1, num_outputs=2), case("Split", outputs=2, axis=1, split=[3, 1], opset=11),
    case("Slice", ints(1, -3), ints(3, 1000), ints(1, 3)), case("Slice", ints(5), ints(0), ints(2), ints(-2)),
    case("Slice", starts=[1], ends=[4], axes=[2], opset=9), case("Gather", ints(2, 0), axis=1),
    case("Gather", np.array(1, np.int64), axis=3), case("Gather", ints(1, 2), axis=2),
    case("Gather", np.array([[0, 1], [2, 2]], np.int64), axis=1),
    case("Pad", ints(0, 0, 1, 2, 0, 1, 3, 0), np.float32(1.5)), case("Pad", ints(0, 0, 1, 2, 0, 0, 1, 1), mode="reflect"),
    case("Pad", ints(0, 0, 1, 2, 0, 0, 1, 1), mode="edge"), case("Pad", ints(0, 0, -1, 0, 0, 0, 0, -2)),
    case("Resize", None, np.array([1, 1, 2, 2], np.float32), mode="nearest"),
    case("Resize", None, None, ints(2, 4, 9, 11), mode="linear"),
    case("Resize", None, None, ints(2, 4, 9, 11), mode="linear", coordinate_transformation_mode="align_corners"),
    case("Resize", None, None, ints(2, 4, 9, 11), mode="nearest", coordinate_transformation_mode="asymmetric",
         nearest_mode="floor"),
    case("Resize", None, None, ints(2, 4, 9, 11), mode="cubic"),
    case("DepthToSpace", blocksize=2), case("DepthToSpace", blocksize=2, mode="CRD"),
    case("SpaceToDepth", blocksize=2, x=(1, 3, 4, 6)),
    case("Expand", ints(2, 4, 6, 7), x=(4, 1, 7)), case("Tile", ints(1, 2, 1, 3)), case("ArgMax", axis=1),
    case("ArgMin", axis=2, keepdims=0), case("Cast", to=TensorProto.INT32), case("Shape"), case("Size"),
    case("Greater", np.float32(0)), case("Equal", np.float32(0)), case("LessOrEqual", floats(7)),
]  # fmt: skip


def write(
    path: Path, nodes: list[Any], sizes: tuple[Any, ...], outputs: list[str], constants: dict[str, Any], opset: int
) -> Path:
    """An .onnx file whose input is `x`."""
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, sizes)]
    infos = [helper.make_empty_tensor_value_info(name) for name in outputs]
    given = [numpy_helper.from_array(value, name) for name, value in constants.items()]
    graph = helper.make_graph(nodes, "net", inputs, infos, given)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    path.write_bytes(onnx.shape_inference.infer_shapes(model).SerializeToString())
    return path


@pytest.mark.parametrize(("operator", "attributes", "more", "marks"), CASES)
def test_an_operator_is_what_onnx_runtime_computes(
    tmp_path: Path, operator: str, attributes: dict[str, Any], more: list[Any], marks: dict[str, Any]
) -> None:
    names = ["x", *(f"c{at}" if value is not None else "" for at, value in enumerate(more))]
    outputs = [f"y{at}" for at in range(marks["outputs"])]
    node = helper.make_node(operator, names, outputs, **attributes)
    constants = {f"c{at}": np.asarray(value) for at, value in enumerate(more) if value is not None}
    file = write(tmp_path / "one.onnx", [node], marks["x"], outputs, constants, marks["opset"])
    x = floats(*marks["x"])
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    wanted = session.run(None, {"x": x})
    found = OnnxModule(read_graph(file))(torch.from_numpy(x))
    for own, other in zip(found if isinstance(found, tuple) else (found,), wanted, strict=True):
        assert own.shape == other.shape
        torch.testing.assert_close(
            own.detach(), torch.from_numpy(other), rtol=2e-5, atol=2e-5, check_dtype=operator != "Cast"
        )


def test_every_operator_has_a_case() -> None:
    shown = {
        "Where",
        "Cast",
        "Not",
        "And",
        "Or",
        "Less",
        "GreaterOrEqual",
        "ConstantOfShape",
        "Upsample",
    }  # in the graph below
    shown |= {"Log", "Sqrt", "Reciprocal", "Sin", "Cos"}
    assert set(OPERATORS) - shown <= {param.values[0] for param in CASES}


def test_a_graph_with_shapes_that_are_computed(tmp_path: Path) -> None:
    node = helper.make_node
    nodes = [
        node("Shape", ["x"], ["s"]), node("Gather", ["s", "zero"], ["n"], axis=0), node("Unsqueeze", ["n", "axis"], ["n1"]),
        node("Concat", ["n1", "rest"], ["sizes"], axis=0), node("Abs", ["x"], ["a"]), node("Sqrt", ["a"], ["q"]),
        node("Reciprocal", ["q"], ["r"]), node("Log", ["a"], ["l"]), node("Sin", ["l"], ["si"]), node("Cos", ["r"], ["co"]),
        node("Add", ["si", "co"], ["t"]), node("Less", ["t", "half"], ["b"]), node("GreaterOrEqual", ["t", "low"], ["g"]),
        node("And", ["b", "g"], ["bg"]), node("Not", ["bg"], ["nb"]), node("Or", ["nb", "b"], ["o"]),
        node("ConstantOfShape", ["s"], ["zeros"]), node("Where", ["bg", "t", "zeros"], ["w"]),
        node("Reshape", ["w", "sizes"], ["f"]), node("Cast", ["o"], ["oc"], to=TensorProto.FLOAT),
        node("Reshape", ["oc", "sizes"], ["of"]), node("Add", ["f", "of"], ["y"]),
    ]  # fmt: skip
    constants = {
        "zero": np.array(0, np.int64), "axis": ints(0), "rest": ints(-1), "half": np.float32(0.5).reshape(()),
        "low": np.float32(-0.5).reshape(()),
    }  # fmt: skip
    file = write(tmp_path / "net.onnx", nodes, X, ["y"], constants, 18)
    x = floats(*X)
    (wanted,) = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"]).run(None, {"x": x})
    torch.testing.assert_close(
        OnnxModule(read_graph(file))(torch.from_numpy(x)), torch.from_numpy(wanted), rtol=1e-5, atol=1e-5
    )
