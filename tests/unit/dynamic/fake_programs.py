"""A net and programs that run it, each for its own sizes only, without tuning. Not a test module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from convoy.deadline import Deadline
from convoy.dynamic.dims import Call
from convoy.dynamic.dynamic_module import DynamicModule
from convoy.dynamic.read_dynamic import read_dynamic
from convoy.dynamic.tune_sizes import tune_sizes
from convoy.plan import Plan
from convoy.program import OptimizedModule, Program, calls


def integers(shape: Any, seed: int) -> torch.Tensor:
    return torch.randint(-2, 3, tuple(shape), generator=torch.Generator().manual_seed(seed)).float()


def images(count: int, size: int = 6, seed: int = 7) -> torch.Tensor:
    return integers((count, 3, size, size), seed)


class Net(nn.Module):
    """Two outputs, one of which lies as the input does; small integers, so that every way to compute it gives the same bits."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, channels, 3, padding=1)
        self.head = nn.Linear(channels, 5)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(integers(parameter.shape, 1))

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None, *, maps: bool = True) -> Any:
        made = self.conv(x).relu()
        if scale is not None:
            made = made * scale
        scores = self.head(made.sum((2, 3)))
        return {"scores": scores, "maps": made} if maps else scores


@dataclass(frozen=True, eq=False)
class SizeProgram(Program):
    """Runs the net for one call signature, and writes down the images that it was given."""

    net: nn.Module | None = None
    signature: calls.Signature = ()
    ran: list[int] | None = None

    def __call__(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        strides: calls.Strides | str = "as made",
        model: nn.Module | None = None,
        *,
        flat: bool = False,
    ) -> Any:
        assert not flat
        assert calls.signature_of(args, kwargs) == self.signature
        assert self.net is not None
        assert self.ran is not None
        self.ran.append(next(calls.tensors_of((args, kwargs))).shape[0])
        with torch.no_grad():
            return self.net(*args, **kwargs)


class Makes:
    """A tuner that makes such programs."""

    def __init__(self, *, faster: bool = True) -> None:
        self.faster = faster
        self.ran: list[int] = []
        self.times: list[float] = []

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], plan: Plan | None) -> Program:
        del plan
        shapes = tuple(str(list(tensor.shape)) for tensor in calls.tensors_of((args, kwargs)))
        made = Plan("net", "0" * 16, shapes, {}, "as_torch", (), "exact", baseline=not self.faster)
        runnable: Any = object() if self.faster else None
        return SizeProgram(made, None, runnable, net=model, signature=calls.signature_of(args, kwargs), ran=self.ran)

    def within(self, time_s: float) -> Makes:
        self.times.append(time_s)
        return self


@dataclass(frozen=True)
class Made:
    """The result of tuning for one size."""

    program: OptimizedModule


def module_for(
    net: nn.Module, *args: Any, dynamic: Any, tuner: Makes | None = None, time_s: float = 1e9, most_programs: int = 0
) -> DynamicModule:
    """A module with such programs, as if a call of n images took n + 0.01 milliseconds.

    Args:
        net: the stock module.
        args: its example.
        dynamic: the ranges.
        tuner: makes the programs.
        time_s: wall time of tuning.
        most_programs: programs up to which measured times ask for further ones.
    """
    makes = tuner or Makes()

    def tune(call: Call, until: Deadline) -> Made:
        makes.times.append(until.left_s)
        return Made(OptimizedModule(net, makes(net, *call, None), *call, makes))

    dims = read_dynamic(dynamic, net.forward, args, {})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("convoy.dynamic.tune_sizes.MOST_PROGRAMS", most_programs)
        found = tune_sizes(net, (args, {}), dims, lambda args, kwargs: net(*args, **kwargs), tune, Deadline(time_s))
    assert isinstance(found.module, DynamicModule)
    return linear(found.module)


def linear(module: DynamicModule) -> DynamicModule:
    """The module as if a call of n images took n + 0.01 milliseconds."""
    for sizes in list(module.size_programs.times_ms):
        module.size_programs.take(sizes, 0.01 + sizes[0])
    tuner: Any = module.program_cache.tuner
    tuner.ran.clear()
    return module
