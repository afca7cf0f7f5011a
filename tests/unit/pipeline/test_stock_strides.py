"""Outputs lie in memory as PyTorch's own, also behind values of one channel, whose strides fit nchw and nhwc."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import convoy
from convoy.pipeline.captured_net import captured_net
from convoy.pipeline.isolation import isolate
from convoy.pipeline.plan_target import target_for
from tests.unit.pipeline.untimed import keep_plans

X = torch.randn(2, 6, 10, 5, generator=torch.Generator().manual_seed(1))

INPUTS: dict[str, Callable[[], torch.Tensor]] = {
    "nchw": X.clone,
    "nhwc": lambda: X.contiguous(memory_format=torch.channels_last),
    "transposed": lambda: X.transpose(2, 3).contiguous().transpose(2, 3),
}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(6, 1, 5, padding=1), nn.GELU(), nn.Conv2d(1, 4, 3, 2, 1), nn.BatchNorm2d(4)).eval()


@pytest.fixture(autouse=True)
def plans_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    keep_plans(monkeypatch)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> convoy.Settings:
    return convoy.Settings(effort="none", deny_engines=("inductor",), db=tmp_path_factory.mktemp("strides") / "perf.db")


@pytest.mark.parametrize("kind", INPUTS)
def test_of_an_optimised_module_and_of_one_that_was_loaded(kind: str, settings: convoy.Settings, tmp_path: Path):
    model, x = net(), INPUTS[kind]()
    fast = convoy.optimize(model, (x,), settings=settings)
    assert not fast.plan.baseline
    loaded = convoy.load(model, fast.save(tmp_path / "plan.json"), (x,), settings=settings)
    with torch.no_grad():
        wanted = model(x)
        for optimised in (fast, loaded, copy.deepcopy(fast)):
            found = optimised(x)
            assert found.stride() == wanted.stride()
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("grad", [True, False])
def test_of_a_compiled_model(kind: str, grad: bool, settings: convoy.Settings):
    options = {"effort": "none", "deny_engines": settings.deny_engines, "db": settings.db}
    model, x = net(), INPUTS[kind]()
    compiled = torch.compile(model.train(grad), backend="convoy", options=options)
    with torch.set_grad_enabled(grad):
        assert compiled(x).stride() == model(x).stride()


def test_a_model_that_runs_nowhere_but_in_an_exporter_keeps_the_traced_strides(settings: convoy.Settings):
    class Exported(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(6, 1, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not torch.compiler.is_exporting():
                raise ValueError("no room")
            return self.conv(x)

    x = INPUTS["nhwc"]()
    isolated = isolate(Exported().eval(), (x,), {})
    net = captured_net("net", isolated, settings, target_for("cpu"))
    assert net.captured.strides == ((24, 1, 3, 1),)
