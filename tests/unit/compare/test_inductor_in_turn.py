"""Inductor compiles beside others; only the first run of its code, which measures, has the device to itself."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator
from pathlib import Path

import pytest
import torch
from torch import nn

from convoy.compare.case import Case
from convoy.compare.framework_session import FrameworkSession
from convoy.compare.frameworks import torch_inductor
from convoy.compare.frameworks.base import BuiltModel, CaseInputs, FrameworkConfig
from convoy.measurement.device.detect import compiler_version


@pytest.mark.skipif(not compiler_version(), reason="needs a C++ compiler")
def test_the_first_run_alone_asks_for_the_device() -> None:
    turns: list[str] = []

    @contextlib.contextmanager
    def turn() -> Generator[None]:
        turns.append("begin")
        yield
        turns.append("end")

    torch._dynamo.reset()
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval()
    x = torch.randn(2, 3, 8, 8)
    compiled = torch_inductor._compiled(Case("resnet18"), model, {}, turn)
    with torch.no_grad():
        wanted = model(x)
        torch.testing.assert_close(compiled(x), wanted)
        assert turns == ["begin", "end"]
        torch.testing.assert_close(compiled(x), wanted)
    assert turns == ["begin", "end"]


def test_options_that_measure_while_they_compile_have_the_device_all_along(tmp_path: Path) -> None:
    found = {
        name: torch_inductor.Inductor((name,)).ways(Case("resnet18", device="cuda"), CaseInputs(tmp_path, {}))[0]
        for name in torch_inductor.GPU_OPTIONS
    }
    assert [name for name, way in found.items() if not way.chooses] == ["default", "conv_1x1_as_mm"]
    training = torch_inductor.FRAMEWORK.ways(Case("resnet18", device="cuda", mode="training"), CaseInputs(tmp_path, {}))
    assert all(way.chooses for way in training)


def test_waiting_for_the_device_is_no_time_of_compiling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def late() -> Generator[None]:
        time.sleep(0.3)
        yield

    (tmp_path / "facts.json").write_text("{}")
    monkeypatch.setattr("convoy.compare.checking.check", lambda *_: (0.0, ""))
    said: list[dict[str, object]] = []
    session = FrameworkSession(Case("resnet18"), tmp_path, said.append, late)

    def build() -> BuiltModel:
        with session.material.turn():
            return BuiltModel(lambda: None, dict)

    session.prepare([FrameworkConfig("one", build, chooses=False)])
    ready = said[-1]["ready"]
    assert isinstance(ready, dict)
    assert 0 <= ready["compile_s"] < 0.2
