"""A model repository for Triton Inference Server: its documented layout, and model.py with a stand-in for the backend."""

from __future__ import annotations

import importlib.util
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils.dlpack import from_dlpack, to_dlpack

import convoy
from convoy.package.program_file import PackedProgram, PackedTensor
from convoy.package.triton_repository import config_text, write_triton_repository
from convoy.problem import TensorSpec
from tests.unit.package.conftest import X


@dataclass
class Tensor:
    """`pb_utils.Tensor`, as far as the model needs it."""

    named: str
    value: torch.Tensor

    def name(self) -> str:
        return self.named

    def to_dlpack(self) -> object:
        return to_dlpack(self.value)

    @staticmethod
    def from_dlpack(name: str, capsule: object) -> Tensor:
        return Tensor(name, from_dlpack(capsule))


@dataclass
class TritonError:
    text: str


@dataclass
class InferenceResponse:
    output_tensors: list[Tensor]
    error: TritonError | None = None


@dataclass
class Request:
    tensors: list[Tensor] = field(default_factory=list)


def get_input_tensor_by_name(request: Request, name: str) -> Tensor | None:
    return next((one for one in request.tensors if one.name() == name), None)


@pytest.fixture
def model(portable: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The model of the repository, as the backend makes it."""
    backend = ModuleType("triton_python_backend_utils")
    for one in (Tensor, TritonError, InferenceResponse, get_input_tensor_by_name):
        setattr(backend, one.__name__, one)
    monkeypatch.setitem(sys.modules, backend.__name__, backend)
    path = write_triton_repository(portable, tmp_path / "models") / "1" / "model.py"
    spec = importlib.util.spec_from_file_location("model", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made = module.TritonPythonModel()
    made.initialize({"model_name": "block", "model_version": "1", "model_config": "{}"})
    return made


def test_requests_are_answered_together_and_each_gets_its_own_samples(model: Any, portable: Path) -> None:
    net = convoy.open(portable, trust=True)
    first, second = Request([Tensor("x", X[:1])]), Request([Tensor("x", X.flip(0))])
    one, two = model.execute([first, second])
    assert one.error is two.error is None
    assert [one.output_tensors[0].name()] == [net.outputs[0].name]
    expected = net.run_samples(torch.cat([X[:1], X.flip(0)]))[0]
    assert torch.equal(one.output_tensors[0].value, expected[:1])
    assert torch.equal(two.output_tensors[0].value, expected[1:])
    model.finalize()


def test_a_request_that_cannot_be_answered_does_not_harm_the_others(model: Any) -> None:
    wrong = [Request([Tensor("x", X[:, :2])]), Request(), Request([Tensor("x", X.double())])]
    answers = model.execute([wrong[0], Request([Tensor("x", X)]), *wrong[1:]])
    assert [answer.error is None for answer in answers] == [False, True, False, False]
    assert answers[2].error.text == "input x is missing"
    assert len(answers[1].output_tensors[0].value) == 2


def test_the_layout_is_the_documented_one(portable: Path, tmp_path: Path) -> None:
    folder = write_triton_repository(portable, tmp_path / "models")
    assert folder == tmp_path / "models" / "block"
    files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    assert files == ["1/block.convoy", "1/model.py", "config.pbtxt"]
    assert (folder / "1" / "block.convoy").read_bytes() == portable.read_bytes()
    text = (folder / "config.pbtxt").read_text(encoding="utf-8")
    assert text.startswith('name: "block"\nbackend: "python"\nmax_batch_size: 2\n')
    assert '{ name: "x", data_type: TYPE_FP32, dims: [ 3, 17, 15 ] }' in text
    assert re.search(r"output \[\n  \{ name: \"\w+\", data_type: TYPE_FP32, dims: \[ 7 \] \}\n\]", text)
    assert "preferred_batch_size: [ 2 ]" in text
    assert text.count("{") == text.count("}")
    with pytest.raises(convoy.InputError, match="without a model of this name"):
        write_triton_repository(portable, tmp_path / "models")
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["block"]


def program(inputs: str, outputs: str) -> PackedProgram:
    def tensors(text: str) -> tuple[PackedTensor, ...]:
        return tuple(PackedTensor(f"t{i}", TensorSpec.parse(word), "any", i) for i, word in enumerate(text.split()))

    empty = PackedProgram.__new__(PackedProgram)
    object.__setattr__(empty, "inputs", tensors(inputs))
    object.__setattr__(empty, "outputs", tensors(outputs))
    return empty


def test_configurations_of_other_packages() -> None:
    several = config_text("a", [program("fp16[8,3] i64[8]", "bf16[8]"), program("fp16[1,3] i64[1]", "bf16[1]")])
    assert "max_batch_size: 8" in several
    assert "preferred_batch_size: [ 1, 8 ]" in several
    assert "data_type: TYPE_INT64, dims: [ 1 ], reshape: { shape: [ ] }" in several
    none = config_text("b", [program("fp32[8,3]", "fp32[3]")])
    assert "max_batch_size: 0" in none
    assert "dims: [ 8, 3 ]" in none
    assert "dynamic_batching" not in none


def test_a_damaged_package_makes_no_repository(damaged: Path, tmp_path: Path) -> None:
    damaged.write_bytes(damaged.read_bytes()[:-9])
    with pytest.raises(convoy.PackageError):
        write_triton_repository(damaged, tmp_path / "models")
    assert not (tmp_path / "models").exists()
