"""A user's script with every public call. `make types` checks it; tests/unit/test_public_types.py runs it."""

from __future__ import annotations

from pathlib import Path
from typing import assert_type

import torch
from torch import nn

import convoy
from convoy import OptimizedModule, Settings, TrainingStep
from convoy.engines.base import Engine


class TwoInputs(nn.Module):
    """A net of two inputs and an option."""

    def __init__(self) -> None:
        super().__init__()
        self.of_image = nn.Conv2d(3, 4, 3)
        self.of_depth = nn.Conv2d(1, 4, 3)

    def forward(self, image: torch.Tensor, depth: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        """[n, 4, h - 2, w - 2]."""
        made: torch.Tensor = self.of_image(image) + scale * self.of_depth(depth)
        return made


def settings_of(folder: Path) -> list[Settings]:
    """Settings by words, by enums, and by default."""
    words = Settings(
        numerics="strict",
        effort="none",
        time_s=60,
        solver="exact",
        layout="nhwc",
        memory_budget_bytes=1 << 30,
        tuning_memory_bytes=1 << 30,
        deterministic=True,
        static_outputs=False,
        isolate=True,
        streams=1,
        stream_memory=1.5,
        timeout_s=10,
        only_engines=["aten"],
        deny_engines=("inductor",),
        db=str(folder / "perf.db"),
        engines=(),
        progress=False,
        keep_freed_memory=False,
        profile=None,
        check="contents",
    )
    enums = Settings(
        numerics=convoy.Numerics.STRICT,
        effort=convoy.Effort.NONE,
        solver=convoy.Solver.EXACT,
        layout=convoy.LayoutChoice.NHWC,
        db=folder / "perf.db",
        check=convoy.Check.CONTENTS,
    )
    assert_type(words.effort, convoy.Effort)
    assert_type(words.numerics, convoy.Numerics)
    assert_type(words.solver, convoy.Solver)
    assert_type(words.layout, convoy.LayoutChoice)
    assert_type(words.check, convoy.Check)
    assert_type(words.only_engines, tuple[str, ...])
    assert_type(words.db, Path | None)
    assert_type(words.time_s, float)
    return [words, enums, Settings()]


def inference(folder: Path) -> OptimizedModule:
    """Optimize, save, load; positional and keyword inputs."""
    settings = Settings(effort="none", only_engines=("aten",), db=folder / "perf.db")
    model = TwoInputs().eval()
    image, depth = torch.randn(2, 3, 8, 8), torch.randn(2, 1, 8, 8)
    fast = convoy.optimize(model, (image, depth), {"scale": 0.5}, settings=settings, name="two inputs")
    assert_type(fast, OptimizedModule)
    result: torch.Tensor = fast(image, depth=depth, scale=0.5)
    module: nn.Module = fast
    assert_type(fast.explain(), str)
    assert_type(fast.explain("of_image"), str)
    assert_type(fast.save(folder / "net.plan.json"), list[Path])
    assert_type(fast.stale(), str | None)
    fast.refresh()
    fast.tune((image[:1], depth[:1]), {"scale": 0.5})
    fast.tune(kwargs={"image": image, "depth": depth})
    fast.improve(0.01, kwargs={"depth": depth, "image": image, "scale": 0.5})
    assert_type(fast.plan.model, str)
    assert len(fast.plans) == 3
    assert result.shape == (2, 4, 6, 6)
    assert module is fast

    one = convoy.optimize(nn.Conv2d(3, 4, 3), image, settings=settings)
    by_name = convoy.optimize(model, kwargs={"image": image, "depth": depth}, settings=settings)
    again = convoy.load(model, folder / "net.plan.json", (image, depth), {"scale": 0.5}, settings=settings)
    several = convoy.load(model, [str(folder / "net.plan.json")], [image, depth], {"scale": 0.5})
    by_name.save(folder / "named.plan.json")
    named = convoy.load(model, folder / "named.plan.json", kwargs={"depth": depth, "image": image})
    assert_type(one, OptimizedModule)
    assert_type(again, OptimizedModule)
    assert_type(several, OptimizedModule)
    assert_type(named, OptimizedModule)
    return fast


def packages(folder: Path) -> torch.Tensor:
    """Export, open, call."""
    settings = Settings(effort="none", only_engines=("aten",), db=folder / "perf.db")
    model = nn.Conv2d(3, 4, 3).eval()
    x = torch.randn(1, 3, 8, 8)
    path = convoy.export(model, folder / "net.convoy", (x,), settings=settings, name="net")
    assert_type(path, Path)
    try:
        net = convoy.open(path, trust=False)
    except convoy.PackageError as error:
        raise SystemExit(error.expected) from error
    assert_type(net, convoy.PackagedModule)
    assert_type(net.model, str)
    assert_type(net.example_inputs(), tuple[torch.Tensor, ...])
    assert len(net.inputs) == len(net.outputs) == 1
    assert net.plan.model == "net"
    result: torch.Tensor = net(x)
    return result


def training(folder: Path) -> TrainingStep:
    """A training step, its plan, and a step of that plan."""
    settings = Settings(effort="none", only_engines=("aten",), db=folder / "perf.db")
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = torch.randn(2, 3, 8, 8), torch.tensor([0, 1])
    step = convoy.training_step(model, nn.functional.cross_entropy, optimizer, (x, y), settings=settings)
    assert_type(step, TrainingStep)
    assert_type(step(x, y), torch.Tensor)
    assert_type(step(x, target=y), torch.Tensor)
    assert_type(step.explain(), str)
    assert_type(step.save(folder / "step.plan.json"), Path)
    assert_type(step.notes, list[str])
    again = convoy.training_step(
        model,
        nn.CrossEntropyLoss(),
        optimizer,
        (x, y),
        amp=torch.bfloat16,
        scaler=None,
        clip_grad_norm=1.0,
        accumulate=2,
        plan=None,
        settings=settings,
        name="net",
    )
    again(x, y)
    again.release()
    return step


def functions() -> list[Engine]:
    """Calls on single tensors."""
    x, weight = torch.randn(1, 3, 8, 8), torch.randn(4, 3, 3, 3)
    y = convoy.conv2d(x, weight, stride=2, padding="valid", engine="aten", settings=Settings(numerics="as_torch"))
    assert_type(y, torch.Tensor)
    engines = convoy.engines()
    assert_type(engines, list[Engine])
    assert_type(convoy.__version__, str)
    return engines


def errors(model: nn.Module, x: torch.Tensor) -> str:
    """The errors that a user catches."""
    try:
        convoy.optimize(model, (x,))
    except convoy.InputError as error:
        assert_type(error.argument, str)
        return error.argument
    except (convoy.PlanError, convoy.SelectionError, convoy.UnsupportedError, convoy.InternalError):
        return "not possible"
    except convoy.ConvoyError as error:
        assert_type(error.exit_code, int)
    return ""
