"""Real frameworks on the smallest of the nets that all have; one that is not installed is skipped."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from convoy.compare import material
from convoy.compare.case import Case
from convoy.compare.checking import check
from convoy.compare.frameworks import FRAMEWORKS
from convoy.compare.frameworks.base import UnsupportedCaseError

PLANTED = Path(__file__).parent / "planted_frameworks.py"


def needs(name: str) -> Any:
    missing = [module for module in FRAMEWORKS[name].needs if importlib.util.find_spec(module) is None]
    return pytest.param(name, marks=pytest.mark.skipif(bool(missing), reason=f"needs {missing}"), id=name)


def errors_of(name: str, case: Case, folder: Path) -> list[str]:
    """What is wrong with each way of a framework."""
    facts = material.read(folder)
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
        case = Case(f"{PLANTED}:tiny", batch=2, size=16, mode=mode)
        folder = tmp_path_factory.mktemp(mode)
        material.make(case, folder)
        found[mode] = (case, folder)
    return found


@pytest.mark.parametrize("mode", ["inference", "training"])
def test_pytorch_in_both_formats(tiny: Any, mode: str) -> None:
    assert errors_of("torch", *tiny[mode]) == ["", ""]


@pytest.mark.parametrize("name", [needs("onnxruntime"), needs("openvino")])
def test_frameworks_that_read_onnx(tiny: Any, name: str) -> None:
    pytest.importorskip("onnxscript")
    material.export_onnx(tiny["inference"][0], material.read(tiny["inference"][1]))
    assert errors_of(name, *tiny["inference"]) == [""]
    with pytest.raises(UnsupportedCaseError):
        errors_of(name, *tiny["training"])


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize("name", [needs("jax"), needs("tensorflow")])
@pytest.mark.parametrize("model", ["alexnet", "googlenet", "resnet50"])
def test_frameworks_with_nets_of_their_own(tmp_path: Path, name: str, model: str, mode: str) -> None:
    case = Case(model, batch=4, size=224 if model == "alexnet" else 64, mode=mode)
    material.make(case, tmp_path)
    assert set(errors_of(name, case, tmp_path)) == {""}


@pytest.mark.parametrize("name", [needs("jax"), needs("tensorflow")])
def test_a_net_without_a_definition_is_refused_by_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(UnsupportedCaseError, match="vgg16"):
        FRAMEWORKS[name].load().ways(Case("vgg16"), material.Material(tmp_path, {}))
