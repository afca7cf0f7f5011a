"""Real frameworks on the smallest of the nets that all have; one that is not installed is skipped."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

from convoy.compare import case_inputs
from convoy.compare.case import Case
from convoy.compare.checking import check
from convoy.compare.frameworks import FRAMEWORKS
from convoy.compare.frameworks.base import CaseInputs, UnsupportedCaseError
from convoy.compare.nets import NETS, Operators, transform_input
from tests.unit.compare.every_operator import every_operator

PLANTED = Path(__file__).parent / "planted_frameworks.py"


def needs(name: str) -> Any:
    missing = [module for module in FRAMEWORKS[name].needs if importlib.util.find_spec(module) is None]
    return pytest.param(name, marks=pytest.mark.skipif(bool(missing), reason=f"needs {missing}"), id=name)


def errors_of(name: str, case: Case, folder: Path) -> list[str]:
    """The fault of each way of a framework."""
    facts = case_inputs.read(folder)
    found: list[str] = []
    for way in FRAMEWORKS[name].load().ways(case, facts):
        built = way.build()
        found.append(check(case, facts, built.check())[1])
        built.run()
        if built.wait is not None:
            built.wait()
        if built.kinds is not None:
            assert sum(built.kinds().values()) > 0
    return found


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Case, Path]]:
    found: dict[str, tuple[Case, Path]] = {}
    for mode in ("inference", "training"):
        case = Case(f"{PLANTED}:tiny", batch=2, size=16, mode=mode, trust=True)
        folder = tmp_path_factory.mktemp(mode)
        case_inputs.make(case, folder)
        found[mode] = (case, folder)
    return found


@pytest.mark.parametrize("mode", ["inference", "training"])
def test_pytorch_in_both_formats(tiny: Any, mode: str) -> None:
    assert errors_of("torch", *tiny[mode]) == ["", ""]


def test_where_fp32_stands_for_what_is_exact_pytorch_has_an_error_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(case_inputs, "ORACLE_FLOPS", 0)
    case = Case(f"{PLANTED}:tiny", batch=2, size=16, mode="training", trust=True)
    facts = case_inputs.make(case, tmp_path)
    assert facts["reference"] == "fp32"
    assert 0 < facts["stock_error"] < 1e-5
    assert errors_of("torch", case, tmp_path) == ["", ""]


@pytest.mark.parametrize("name", [needs("onnxruntime"), needs("openvino")])
def test_frameworks_that_read_onnx(tiny: Any, name: str) -> None:
    pytest.importorskip("onnxscript")
    case_inputs.export_onnx(tiny["inference"][0], case_inputs.read(tiny["inference"][1]))
    assert errors_of(name, *tiny["inference"]) == [""]
    with pytest.raises(UnsupportedCaseError):
        errors_of(name, *tiny["training"])


@pytest.fixture(scope="module")
def every(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[Case, Path]]]:
    """The net of all operators, under a name that the frameworks find; what PyTorch makes of it, for both modes."""
    model, found = f"{PLANTED}:every_operator", {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(NETS, model, every_operator)
        for mode in ("inference", "training"):
            case = Case(model, batch=4, size=17, mode=mode, trust=True)
            folder = tmp_path_factory.mktemp(f"every-{mode}")
            case_inputs.make(case, folder)
            found[mode] = (case, folder)
        yield found


@pytest.mark.parametrize("name", [needs("jax"), needs("tensorflow")])
@pytest.mark.parametrize("mode", ["inference", "training"])
def test_every_operator_and_its_gradient(every: Any, name: str, mode: str) -> None:
    """With `test_nets`, which holds each net to torchvision's over the same operators, this proves every net in every mode."""
    assert set(errors_of(name, *every[mode])) == {""}


@pytest.mark.parametrize("operator", ["conv", "relu6", "max_pool", "avg_pool", "mean", "multiply", "affine"])
def test_a_wrong_operator_is_seen(every: Any, monkeypatch: pytest.MonkeyPatch, operator: str) -> None:
    pytest.importorskip("jax")
    lax = importlib.import_module("convoy.compare.frameworks.jax_xla").Lax
    right = getattr(lax, operator)
    monkeypatch.setattr(lax, operator, lambda self, *args, **more: 1.01 * right(self, *args, **more))
    case, folder = every["inference"]
    (way, _) = FRAMEWORKS["jax"].load().ways(case, case_inputs.read(folder))
    assert "relative error" in check(case, case_inputs.read(folder), way.build().check())[1]


def test_the_net_of_all_operators_has_them_all() -> None:
    ops = MagicMock()
    ops.height.return_value = 5
    every_operator(ops, MagicMock())
    transform_input(ops, MagicMock())
    wanted = [name for name in vars(Operators) if not name.startswith("_")]
    assert len(wanted) > 10
    assert [name for name in wanted if not getattr(ops, name).called] == []


SIZES = {"alexnet": 224, "vgg19": 224, "inception_v3": 75, "mobilenet_v2": 96}
"""Height and width, pixels, where 64 are too few; for MobileNetV2, because rounding moves its gradients by per cents there."""

BATCHES = {"vgg19": 1}
"""Images, where four take too long."""

TRAINED = ("alexnet", "googlenet", "resnet50", "densenet121", "mobilenet_v2", "efficientnet_b0")
"""VGG's step has nothing that AlexNet's has not; rounding moves Inception v3's by more than is allowed, on so few pixels."""

OWN = [pytest.param(model, "training", marks=pytest.mark.long) for model in TRAINED]
OWN += [pytest.param(model, "inference", marks=pytest.mark.long) for model in (*TRAINED[:-2], "efficientnet_b0")]
OWN += [pytest.param(model, "inference", marks=pytest.mark.long) for model in ("vgg19", "inception_v3")]
OWN += [("mobilenet_v2", "inference")]


@pytest.mark.slow
@pytest.mark.parametrize("name", [needs("jax"), needs("tensorflow")])
@pytest.mark.parametrize(("model", "mode"), OWN)
def test_frameworks_with_nets_of_their_own(tmp_path: Path, name: str, model: str, mode: str) -> None:
    case = Case(model, batch=BATCHES.get(model, 4), size=SIZES.get(model, 64), mode=mode)
    case_inputs.make(case, tmp_path)
    assert set(errors_of(name, case, tmp_path)) == {""}


@pytest.mark.parametrize("name", [needs("jax"), needs("tensorflow")])
def test_a_net_without_a_definition_is_refused_by_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(UnsupportedCaseError, match="vgg11"):
        FRAMEWORKS[name].load().ways(Case("vgg11"), CaseInputs(tmp_path, {}))


ON_GPU = [Case("tiny", device="cuda", mode=mode) for mode in ("inference", "training")]


@pytest.mark.parametrize("name", [needs("onnxruntime")])
def test_onnx_runtime_on_a_gpu_tells_no_memory_rather_than_the_hosts(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    from convoy.compare.frameworks import onnx_runtime

    monkeypatch.setattr(onnx_runtime.onnxruntime, "get_available_providers", lambda: ["CUDAExecutionProvider"])
    monkeypatch.setattr(onnx_runtime.onnxruntime, "OrtValue", MagicMock())
    monkeypatch.setattr(onnx_runtime, "_session", MagicMock())
    facts = MagicMock(input=lambda: np.zeros((1, 3, 4, 4)))
    for way in FRAMEWORKS[name].load().ways(ON_GPU[0], facts):
        built = way.build()
        assert built.peak_memory is not None
        assert built.peak_memory() is None
        assert any("no figure for memory" in note for note in built.notes)
    (on_cpu,) = FRAMEWORKS[name].load().ways(Case("tiny"), facts)
    assert on_cpu.build().peak_memory is None  # the process's own is what counts there


def tensorflow_keras(monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, MagicMock]:
    """The module over a TensorFlow that does nothing, under another name; and that TensorFlow."""
    tensorflow = MagicMock()
    monkeypatch.setenv("KERAS_BACKEND", "tensorflow")
    monkeypatch.setitem(sys.modules, "tensorflow", tensorflow)
    monkeypatch.setitem(sys.modules, "keras", MagicMock())
    path = Path(sys.modules[Case.__module__].__file__ or "").parent / "frameworks" / "tensorflow_keras.py"
    spec = importlib.util.spec_from_file_location("hollow_tensorflow_keras", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "keras_model", MagicMock())
    monkeypatch.setattr(module, "net_of", MagicMock())
    return module, tensorflow


@pytest.mark.parametrize("case", ON_GPU, ids=lambda case: case.mode)
def test_tensorflow_on_a_gpu_counts_its_peak_from_the_time_when_it_is_built(
    monkeypatch: pytest.MonkeyPatch, case: Case
) -> None:
    module, tensorflow = tensorflow_keras(monkeypatch)
    memory = tensorflow.config.experimental
    memory.get_memory_info.return_value = {"current": 1, "peak": 7}
    facts = MagicMock(input=lambda: np.zeros((1, 3, 4, 4)))
    for way in module.FRAMEWORK.ways(case, facts):
        built = way.build()
        assert built.peak_memory is not None
        assert built.restart_peak is not None
        memory.reset_memory_stats.reset_mock()
        built.restart_peak()
        memory.reset_memory_stats.assert_called_once_with("GPU:0")
        assert built.peak_memory() == 7
    cpu = module.FRAMEWORK.ways(Case("tiny", mode=case.mode), facts)[0].build()
    assert (cpu.peak_memory, cpu.restart_peak) == (None, None)
