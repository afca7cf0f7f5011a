"""A net whose bottlenecks run as one kernel each: which are proposed; a plan is saved, loaded, explained, exported."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import convoy
from convoy.engines.base import Engine, Executable
from convoy.engines.hopper import hopper_support_checks
from convoy.engines.hopper.chains.bottleneck_problem import bottleneck_of
from convoy.engines.library.aten import ENGINE as ATEN
from convoy.engines.manifest import load_engine
from convoy.pipeline.check import end_to_end
from convoy.pipeline.net import capture_net
from convoy.pipeline.optimize import optimize_model
from convoy.regions.region import Region
from convoy.support import Support
from convoy.target import Target
from convoy.zoo.torchvision_import import import_torchvision

H100 = Target("cuda", "an H100 that is not there", "sm_90", 132, 80 << 30, 50 << 20)


class Bottleneck(nn.Module):
    """Three convolutions and a residual, as in ResNet-50."""

    def __init__(self, channels: int, inside: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(channels, inside, 1, bias=False), nn.BatchNorm2d(inside), nn.ReLU())
        self.second = nn.Sequential(
            nn.Conv2d(inside, inside, 3, padding=1, bias=False), nn.BatchNorm2d(inside), nn.ReLU()
        )
        self.third = nn.Sequential(nn.Conv2d(inside, channels, 1, bias=False), nn.BatchNorm2d(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of the same shape."""
        return torch.relu(self.third(self.second(self.first(x))) + x)


def net(*blocks: nn.Module) -> nn.Module:
    """In half precision and channels_last."""
    torch.manual_seed(1)
    return nn.Sequential(*blocks).half().eval().to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def image(channels: int, side: int) -> torch.Tensor:
    """One image of half values."""
    return torch.randn(1, channels, side, side).half().contiguous(memory_format=torch.channels_last)


def proposed(model: nn.Module, x: torch.Tensor, target: Target = H100, **settings: Any) -> list[Region]:
    """The regions of bottlenecks."""
    found = capture_net("net", model, (x,), {}, convoy.Settings(**settings), target)
    return [region for region in found.regions if region.pattern == "block"]


def test_bottlenecks_are_proposed_where_a_kernel_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper_support_checks, "absence", lambda: "")
    model, x = net(Bottleneck(128, 64), Bottleneck(128, 64)), image(128, 8)
    assert [len(proposed(model, x, effort=effort)) for effort in ("none", "quick", "full")] == [2, 2, 2]
    assert proposed(model, x, replace(H100, arch="sm_80"), effort="none") == []
    assert proposed(model, x, effort="none", deny_engines=("cuda.bottleneck",)) == []
    assert proposed(net(Bottleneck(96, 48)), image(96, 8), effort="none") == []


class InvertedBlock(nn.Module):
    """Three convolutions and a residual, as in MobileNetV2."""

    def __init__(self, channels: int, inside: int, stride: int = 1) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(channels, inside, 1, bias=False), nn.BatchNorm2d(inside), nn.ReLU6(),
            nn.Conv2d(inside, inside, 3, stride, 1, groups=inside, bias=False), nn.BatchNorm2d(inside), nn.ReLU6(),
            nn.Conv2d(inside, channels, 1, bias=False), nn.BatchNorm2d(channels),
        )  # fmt: skip
        self.adds = stride == 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of the same channels."""
        return self.layers(x) + x if self.adds else self.layers(x)


def test_inverted_residual_blocks_are_proposed_where_a_kernel_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper_support_checks, "absence", lambda: "")
    monkeypatch.setattr("convoy.engines.triton.triton_build.installed", lambda: True)
    model, x = net(InvertedBlock(16, 96), InvertedBlock(16, 96, 2)), image(16, 8)

    def found(target: Target, **settings: Any) -> list[Region]:
        captured = capture_net("net", model, (x,), {}, convoy.Settings(effort="none", **settings), target)
        return [region for region in captured.regions if region.pattern == "inverted"]

    for arch in ("sm_80", "sm_90"):
        regions = found(replace(H100, arch=arch))
        assert [len(region.nodes) for region in regions] == [6, 5]
        assert all(load_engine("cuda.inverted_residual").supports(p, H100) for r in regions for p in r.problems)
    assert found(replace(H100, arch="sm_75")) == []
    assert found(H100, deny_engines=("cuda.inverted_residual",)) == []


@pytest.mark.parametrize(("name", "expanded", "whole"), [("efficientnet_b0", 15, 0), ("mobilenet_v3_large", 14, 6)])
def test_layers_before_gates_are_found(monkeypatch: pytest.MonkeyPatch, name: str, expanded: int, whole: int) -> None:
    """Every block with an expansion has the pattern; those without a gate are also proposed whole."""
    models = import_torchvision().models
    monkeypatch.setattr(hopper_support_checks, "absence", lambda: "")
    monkeypatch.setattr("convoy.engines.triton.triton_build.installed", lambda: True)
    model = models.get_model(name).eval().half().to(memory_format=torch.channels_last)
    captured = capture_net(name, model, (image(3, 64),), {}, convoy.Settings(effort="none"), H100)
    found = {pattern: [r for r in captured.regions if r.pattern == pattern] for pattern in ("expanded", "inverted")}
    assert {pattern: len(regions) for pattern, regions in found.items()} == {"expanded": expanded, "inverted": whole}
    engine = load_engine("cuda.expand_depthwise")
    assert all(engine.supports(problem, H100) for region in found["expanded"] for problem in region.problems)


class Whole(Executable):
    """A bottleneck's layers in ATen, as one executable."""

    def __init__(self, inner: Executable) -> None:
        self.inner = inner
        self.allocates_results = inner.allocates_results
        self.workspace_bytes = inner.workspace_bytes

    def pack(self, constants: Any) -> Any:
        """As ATen's."""
        return self.inner.pack(constants)

    def launch(self, buffers: Any, workspace: torch.Tensor | None) -> None:
        """As ATen's."""
        self.inner.launch(buffers, workspace)


class Blocks(Engine):
    """Takes what `cuda.bottleneck` takes, on a CPU."""

    id = "own"
    family = "direct"
    devices = ("cpu",)
    patterns = ("block",)
    estimates_subgraphs = True

    def supports(self, problem: Any, target: Target) -> Support:
        """Bottlenecks."""
        del target
        found = bottleneck_of(problem.text) if hasattr(problem, "text") else "is no subgraph"
        return Support.no(found) if isinstance(found, str) else Support.yes()

    def estimate_us(self, problem: Any, knobs: Any, target: Target) -> float:
        """Much less than any layer takes."""
        del problem, knobs, target
        return 0.01

    def build(self, problem: Any, knobs: Any, target: Target) -> Executable:
        """ATen's."""
        return Whole(ATEN.build(problem, knobs, target))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A net of one bottleneck with a plan that computes it in one step."""
    module = ModuleType("own_blocks")
    module.Blocks = Blocks  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "own_blocks", module)
        patch.setattr(end_to_end, "why_slow", lambda *_: "")  # ATen takes as long, whatever the kernel promises
        folder = tmp_path_factory.mktemp("blocks")
        settings = convoy.Settings(
            db=folder / "perf.db", isolate=False, engines=("own=own_blocks:Blocks",), only_engines=("own",), layout="nhwc",
            solver="single",
        )  # fmt: skip
        model, x = net(Bottleneck(64, 64), nn.Conv2d(64, 8, 1)), image(64, 6)
        result = optimize_model(model, (x,), name="blocks", settings=settings)
        yield SimpleNamespace(model=model, x=x, settings=settings, folder=folder, result=result)
        load_engine.cache_clear()


def test_a_plan_with_a_bottleneck_is_right_and_says_so(made: Any) -> None:
    (layer,) = [layer for layer in made.result.summary.layers if layer.engine == "own"]
    assert layer.flops == 2 * 36 * (64 * 64 + 9 * 64 * 64 + 64 * 64)
    (step,) = [step for step in made.result.plan.steps if step.config.engine == "own"]
    assert step.pattern == "block"
    assert "own" in made.result.program.explain()
    assert "PyTorch" in made.result.program.explain(step.nodes[0])
    with torch.no_grad():
        assert torch.allclose(made.result.program(made.x), made.model(made.x), atol=2e-3, rtol=2e-3)


def test_its_plan_file_is_loaded(made: Any) -> None:
    (path,) = made.result.program.save(made.folder / "plan.json")
    again = convoy.load(made.model, path, (made.x,), settings=made.settings)
    with torch.no_grad():
        assert torch.equal(again(made.x), made.result.program(made.x))


def test_its_package_gives_the_same_bits(made: Any) -> None:
    path = convoy.export(made.result.program, made.folder / "net.convoy")
    with torch.no_grad():
        assert torch.equal(convoy.open(path)(made.x), made.result.program(made.x))
