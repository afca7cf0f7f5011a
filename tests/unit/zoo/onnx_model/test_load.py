"""ONNX files as modules: open sizes, weights beside the file, what is refused, and the check against ONNX Runtime."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from onnx import helper  # noqa: E402

import convoy  # noqa: E402
from convoy.errors import InputError  # noqa: E402
from convoy.zoo import load_model  # noqa: E402
from convoy.zoo.onnx_model import module  # noqa: E402
from tests.unit.zoo.onnx_model.test_operators import X, write  # noqa: E402

WEIGHT = np.random.default_rng(1).standard_normal((3, 4, 3, 3)).astype(np.float32)


def net(path: Path, sizes: tuple[object, ...] = ("n", 4, 8, 8), operator: str = "Relu") -> Path:
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1]), helper.make_node(operator, ["c"], ["r"]),
        helper.make_node("GlobalAveragePool", ["r"], ["p"]), helper.make_node("Flatten", ["p"], ["y"]),
    ]  # fmt: skip
    return write(path, nodes, sizes, ["y"], {"w": WEIGHT}, 17)


def test_a_net_runs_at_every_batch_that_the_file_leaves_open_and_is_optimized(tmp_path: Path) -> None:
    model = load_model(str(net(tmp_path / "net.onnx")))
    weight = torch.from_numpy(WEIGHT)
    for batch in (1, 3):
        x = torch.randn(batch, 4, 8, 8)
        wanted = torch.relu(nn.functional.conv2d(x, weight, padding=1)).mean((2, 3))
        torch.testing.assert_close(model(x), wanted, rtol=1e-5, atol=1e-6)
    (example,) = model.example_input_array
    assert example.shape == (1, 4, 8, 8)
    settings = convoy.Settings(effort="none", db=tmp_path / "c.db", isolate=False, only_engines=("aten",))
    fast = convoy.optimize(model, (example,), settings=settings)
    torch.testing.assert_close(fast(example), model(example), rtol=1e-4, atol=1e-5)


def test_half_types_compute_in_half(tmp_path: Path) -> None:
    model = load_model(str(net(tmp_path / "net.onnx", X)), dtype="bf16")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model(torch.randn(X).bfloat16()).dtype == torch.bfloat16


def test_weights_may_lie_in_a_file_of_the_same_folder_alone(tmp_path: Path) -> None:
    file = net(tmp_path / "net.onnx")
    whole = load_model(str(file))
    x = torch.randn(1, 4, 8, 8)
    onnx.save_model(onnx.load(file), file, save_as_external_data=True, location="net.data", size_threshold=0)
    assert (tmp_path / "net.data").exists()
    torch.testing.assert_close(load_model(str(file))(x), whole(x))
    data = (tmp_path / "net.data").read_bytes()
    (tmp_path / "net.data").write_bytes(data[:100])
    with pytest.raises(InputError, match="ends before the tensor"):
        load_model(str(file))
    proto = onnx.load(file, load_external_data=False)
    for location in ("../net.data", "/etc/passwd", "", ".."):
        proto.graph.initializer[0].external_data[0].value = location
        file.write_bytes(proto.SerializeToString())
        with pytest.raises(InputError, match="not a file of the same folder"):
            load_model(str(file))


def test_what_cannot_be_a_module_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"the operators Hardmax \(1\)"):
        load_model(str(net(tmp_path / "net.onnx", operator="Hardmax")))
    (tmp_path / "bad.onnx").write_bytes(b"\x08\x07nonsense")
    with pytest.raises(InputError, match="a whole ONNX model"):
        load_model(str(tmp_path / "bad.onnx"))
    with pytest.raises(InputError, match="that is there"):
        load_model(str(tmp_path / "none.onnx"))
    with pytest.raises(InputError, match="weights"):
        load_model(str(net(tmp_path / "net.onnx")), weights="DEFAULT")


def test_a_value_that_no_memory_holds_is_refused_before_it_is_computed(tmp_path: Path) -> None:
    nodes = [helper.make_node("Tile", ["x", "t"], ["y"])]
    file = write(tmp_path / "net.onnx", nodes, X, ["y"], {"t": np.array([1 << 20, 1 << 10, 1, 1], np.int64)}, 17)
    with pytest.raises(InputError, match="elements"):
        load_model(str(file))


def test_an_operator_that_computes_something_else_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(module.OPERATORS, "Relu", lambda _node, inputs: torch.sigmoid(inputs[0]))
    with pytest.raises(InputError, match="as ONNX Runtime does"):
        load_model(str(net(tmp_path / "net.onnx")))
