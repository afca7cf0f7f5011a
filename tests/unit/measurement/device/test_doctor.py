import pytest
import torch

from convoy.engines.manifest import MANIFEST
from convoy.measurement import detect_target
from convoy.measurement.device import doctor
from convoy.measurement.device.doctor import Finding, findings, sample_problems
from convoy.measurement.reference_data import ReferenceData


def by_name():
    return {finding.what: finding for finding in findings()}


def test_devices_packages_and_every_engine_are_listed():
    found = by_name()
    assert found["CPU"].ok
    assert detect_target("cpu").digest in found["CPU"].means
    assert found["torch"] == Finding("torch", torch.__version__, "needed for everything", ok=True)
    assert {name for name in found if name.startswith("engine ")} == {f"engine {engine}" for engine in MANIFEST}
    assert "works on cpu" in found["engine aten"].found
    assert all(finding.means and finding.found for finding in found.values())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_its_engines_say_what_they_need():
    found = by_name()
    assert not found["GPU"].ok
    assert found["GPU"].found.startswith("none: torch ")
    kernel = found["engine triton.implicit_gemm"]
    assert not kernel.ok
    assert "CUDA" in kernel.means


def test_what_is_missing_is_missed_only_where_it_is_needed(monkeypatch):
    monkeypatch.setattr(doctor, "installed", lambda name: "")
    monkeypatch.setattr(doctor, "compiler_version", lambda: "")
    found = by_name()
    assert not found["highspy"].ok
    assert found["highspy"].found == "not installed"
    assert not found["C++ compiler"].ok
    assert found["nvidia-cudnn-frontend"].ok is (not torch.cuda.is_available())


def test_an_engine_that_cannot_be_loaded_says_why(monkeypatch):
    monkeypatch.setitem(MANIFEST, "ghost", "convoy.engines.no_such_module")
    ghost = by_name()["engine ghost"]
    assert not ghost.ok
    assert "ModuleNotFoundError" in ghost.means


def test_sample_problems_are_whole():
    problems = sample_problems()
    assert len({problem.key for problem in problems}) == len(problems)
    ReferenceData(problems[-1], detect_target("cpu")).fill()
