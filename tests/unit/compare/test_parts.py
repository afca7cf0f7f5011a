"""The small parts of a comparison: checks, layer kinds, memory, energy, the lock, what goes wrong in a child."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from convoy.compare import child, child_failure
from convoy.compare.case import Case
from convoy.compare.checking import check, relative_error
from convoy.compare.energy import counter_of, joules_counter
from convoy.compare.frameworks.base import CaseInputs, UnsupportedCaseError, net_of
from convoy.compare.layer_kinds import KINDS, by_kind, kind_of
from convoy.compare.process_memory import available_bytes, resident_bytes
from convoy.compare.runs import device_lock as lock
from convoy.compare.runs import manifest
from convoy.compare.runs.device_lock import claim, device_lock, others_at_work
from convoy.errors import InputError
from convoy.target import Target

CPU = Target("cpu", "Some CPU @ 3", "avx2", 2, 0, 0)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten::mkldnn_convolution", "conv"),
        ("mkldnn::_convolution_pointwise.binary", "conv"),
        ("sm90_xmma_fprop_implicit_gemm_bf16", "conv"),
        ("FusedConv", "conv"),
        ("aten::native_batch_norm", "norm"),
        ("void cudnn::bn_fw_tr_1C11_kernel_NCHW", "norm"),
        ("aten::max_pool2d_with_indices", "pool"),
        ("aten::addmm", "linear"),
        ("Gemm", "linear"),
        ("FullyConnected", "linear"),
        ("aten::clamp_min_", "pointwise"),
        ("Relu", "pointwise"),
        ("aten::copy_", "copy"),
        ("Reorder", "copy"),
        ("Torch-Compiled Region: 0/0", "fused"),
        ("triton_poi_fused_relu_1", "fused"),
        ("Optimizer.step#SGD.step", "optimizer"),
        ("something", "other"),
    ],
)
def test_kinds_by_name(name: str, kind: str) -> None:
    assert kind_of(name) == kind
    assert kind in KINDS


def test_kinds_are_summed_in_order_without_zeros() -> None:
    assert list(by_kind([("pool", 1.0), ("conv", 2.0), ("conv2", 3.0), ("gemm", 0.0)]).items()) == [
        ("conv", 5.0),
        ("pool", 1.0),
    ]


def test_relative_error_and_its_traps() -> None:
    exact = {"out0": np.array([[3.0, 4.0]])}
    assert relative_error({"out0": np.array([[3.0, 4.5], [9, 9]])}, exact) == pytest.approx(
        0.1
    )  # the first image stands for all
    assert relative_error({"out0": np.array([[np.nan, 4.0]])}, exact) == float("inf")
    with pytest.raises(ValueError, match="shape"):
        relative_error({"out0": np.zeros((1, 3))}, exact)
    with pytest.raises(ValueError, match="wanted are out0"):
        relative_error({"out1": exact["out0"]}, exact)


class Exact(CaseInputs):
    def exact(self) -> dict[str, Any]:
        return {"loss0": np.array(2.0), "loss1": np.array(1.9), "grad:w": np.ones(4)}


def test_training_is_checked_by_gradients_and_by_the_loss_after_the_step() -> None:
    case = Case("net", mode="training")
    material = Exact(Path(), {"limits": {"grad": 1e-3, "loss": 1e-3}})
    right = material.exact()
    assert check(case, material, right) == (0.0, "")
    assert "gradients" in check(case, material, {**right, "grad:w": np.full(4, 1.01)})[1]
    assert "loss after" in check(case, material, {**right, "loss1": np.array(2.0)})[1]  # no update was made
    assert "loss before" in check(case, material, {**right, "loss0": np.array(np.nan)})[1]
    assert "wanted are" in check(case, material, {"loss0": np.array(2.0)})[1] or check(case, material, {})[0] == float(
        "inf"
    )


def test_only_defined_nets_are_known_outside_pytorch() -> None:
    assert net_of(Case("resnet50")) == "resnet50"
    with pytest.raises(UnsupportedCaseError, match="vgg11 is defined for PyTorch alone"):
        net_of(Case("vgg11"))


def test_a_second_run_on_a_device_is_noticed(tmp_path: Path) -> None:
    with device_lock(CPU, tmp_path) as first, device_lock(CPU, tmp_path) as second:
        assert first == ""
        assert "another run of Convoy is on this CPU" in second
        with device_lock(Target("cpu", "Other", "avx2", 2, 0, 0), tmp_path) as other:
            assert other == ""
    with device_lock(CPU, tmp_path) as again:
        assert again == ""


def test_runs_on_different_gpus_are_no_trouble(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Target("cuda", "GPU", "sm_90", 1, 0, 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with device_lock(gpu, tmp_path) as first:
        assert first == ""
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
        with device_lock(gpu, tmp_path) as second:
            assert second == ""
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
        with device_lock(gpu, tmp_path, count=2) as both:
            assert "another run" in both
    with device_lock(gpu, tmp_path, count=2) as both, device_lock(gpu, tmp_path) as first:
        assert both == ""
        assert "another run" in first


def test_where_no_lock_can_be_made_the_run_goes_on(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with device_lock(CPU, tmp_path / "file" / "folder") as warning:
        assert warning == ""


def test_a_busy_machine_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock.os, "cpu_count", lambda: 4)
    monkeypatch.setattr(lock.os, "getloadavg", lambda: (3.0, 0, 0), raising=False)
    assert "3.0 processes" in others_at_work(CPU)
    monkeypatch.setattr(lock.os, "getloadavg", lambda: (0.5, 0, 0), raising=False)
    assert others_at_work(CPU) == ""
    gpu = Target("cuda", "GPU", "sm_90", 1, 0, 0)
    for words, warned in ((["87"], True), (["3"], False), (["[N/A]"], False), ([], False)):
        monkeypatch.setattr(lock, "ask_gpu", lambda *_, words=words, **__: words)
        assert ("another program keeps the GPU 87 % busy" in others_at_work(gpu)) == warned


def test_a_claim_tells_and_gives_what_makes_figures_doubtful(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(lock, "others_at_work", lambda _: "")
    said: list[str] = []
    with claim(CPU, said.append) as alone:
        assert (alone, said) == ([], [])
        monkeypatch.setattr(lock, "others_at_work", lambda _: "busy")
        with claim(CPU, said.append) as second:
            assert len(second) == 2
            assert said == [f"warning: {note}" for note in second]
            assert second[1] == "busy"


def test_nvidia_smi_is_asked_of_the_gpu_that_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def tool(command: list[str]) -> str:
        asked.append(command)
        return "1980 MHz, 700.00 W\n1200 MHz, 500.00 W\n"

    monkeypatch.setattr(manifest, "ask_tool", tool)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4")
    assert manifest.ask_gpu("clocks.sm", "power.limit") == ["1980 MHz", "700.00 W"]
    assert asked[0][:3] == ["nvidia-smi", "--id=3", "--query-gpu=clocks.sm,power.limit"]
    assert manifest.ask_gpu("clocks.sm") == []
    assert manifest.gpu_clocks() == {}


class Gpu:
    """A GPU's driver that is asked for joules, and may have no answer."""

    def __init__(self, *answers: float | None) -> None:
        self.answers = list(answers)

    def joules(self) -> float | None:
        return self.answers.pop(0)


def test_energy_is_read_where_the_driver_counts_it() -> None:
    counter = counter_of(Gpu(10.0, 12.5, None, 13.0))  # type: ignore[arg-type]
    assert counter is not None
    assert [counter() for _ in range(3)] == [12.5, 12.5, 13.0]
    assert counter_of(Gpu(None)) is None  # type: ignore[arg-type]
    assert counter_of(None) is None

    def absent(_: str) -> Any:
        raise OSError

    assert joules_counter("00000000:1B:00.0", absent) is None


def test_memory_of_a_process_that_is_not_there() -> None:
    assert resident_bytes(2**22 + 1) == 0
    assert available_bytes() >= 0


@pytest.mark.parametrize(
    ("error", "stage", "status"),
    [
        (MemoryError(), "run", "out_of_memory"),
        (RuntimeError("CUDA out of memory. Tried to allocate"), "build", "out_of_memory"),
        (RuntimeError("std::bad_alloc"), "build", "out_of_memory"),
        (UnsupportedCaseError("no"), "build", "unsupported"),
        (child_failure.WrongResultError("off"), "build", "wrong_result"),
        (ImportError("no such library"), "import", "launch_error"),
        (ValueError("x"), "build", "compile_error"),
        (ValueError("x"), "run", "launch_error"),
    ],
)
def test_what_an_exception_means(error: Exception, stage: str, status: str) -> None:
    assert child_failure.failure(error, stage)["status"] == status


def test_the_users_input_is_told_apart() -> None:
    found = child_failure.failure(InputError("model", "x", "a model", "Name one."), "build")
    assert (found["argument"], found["value"], found["expected"], found["todo"]) == (
        "model",
        "x",
        "a model",
        "Name one.",
    )


def test_a_child_whose_material_is_missing_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "_use_cores", lambda _case: None)
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    said: list[dict[str, Any]] = []
    hello = {
        "role": "framework",
        "case": Case("net").to_dict(),
        "folder": str(tmp_path),
        "entry": {"id": "right", "location": "tests.unit.compare.planted_frameworks:RIGHT"},
    }
    child.serve(json.loads(json.dumps(hello)), said.append, io.StringIO("").readline)
    assert said[0] == {"stage": "build"}
    assert "facts.json" in said[1]["failed"]["reason"]


def test_a_case_keeps_height_and_width_through_json() -> None:
    case = Case("net", size=(12, 20))
    assert Case.from_dict(json.loads(json.dumps(case.to_dict()))) == case
    assert case.axes == {"size": "12x20"}
    assert (Case("net", size=12).axes, Case("net").axes) == ({"size": 12}, {})
