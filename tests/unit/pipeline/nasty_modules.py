"""Modules that notice when they are run: counters, hooks, caches, random numbers, flags; and everything that a run may change."""

from __future__ import annotations

import logging
import os
import random
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils import prune
from torch.nn.utils import weight_norm as old_weight_norm
from torch.nn.utils.parametrizations import spectral_norm, weight_norm


class Base(nn.Module):
    """A convolution, and what a subclass adds before it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(self.before(x)).relu()

    def before(self, x: torch.Tensor) -> torch.Tensor:
        return x


class CountsInABuffer(Base):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frames", torch.zeros(()))

    def before(self, x: torch.Tensor) -> torch.Tensor:
        self.frames += 1
        return x


class CountsInPython(Base):
    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen = 0, []

    def before(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen.append(tuple(x.shape))
        return x


class OverwritesItsInput(Base):
    def before(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(1.01)


class Draws(Base):
    def before(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1e-3 * torch.rand_like(x)


class DrawsInPython(Base):
    def before(self, x: torch.Tensor) -> torch.Tensor:
        return x * (1 + random.random() * 1e-9 + np.random.rand() * 1e-9)


class Caches(Base):
    """Builds a table in its first call, as anchors and positions are."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}

    def before(self, x: torch.Tensor) -> torch.Tensor:
        self.sizes.setdefault(x.shape[-1], x.shape[-1] // 2)
        return x[..., : self.sizes[x.shape[-1]]]


class KeepsItsFeatures(Base):
    def before(self, x: torch.Tensor) -> torch.Tensor:
        self.features = x + 1
        return x


class Switches(Base):
    """Leaves flags and the environment otherwise than it found them."""

    def before(self, x: torch.Tensor) -> torch.Tensor:
        torch.backends.cudnn.benchmark = not torch.backends.cudnn.benchmark
        os.environ["CONVOY_PLANTED"] = str(random.random())
        return x


class AutocastInside(Base):
    def before(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return (x @ torch.eye(x.shape[-1])).float()


class NoGradInside(Base):
    def before(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return x * 2


class Accumulates(Base):
    """Derives inside its forward pass, into its parameters' `grad`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            self.conv(x.detach()).sum().backward()
        return self.conv(x)


class Merges(Base):
    """Merges its weights when it is put in evaluation mode."""

    def train(self, mode: bool = True) -> Merges:
        if not mode and self.training:
            self.conv.weight.data.add_(1)
        return super().train(mode)


class WritesItsWeight(Base):
    """Normalises its weight in place in every call, and cannot be captured."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.conv.weight.mul_(1 + 0 * float(x.sum())).mul_(1.5)
        return self.conv(x)


class Branches(Base):
    """Control flow that depends on data, and a counter: its layers are swapped one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frames", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.frames += 1
        y = self.conv(x.mul_(1.5))
        return y * 2 if float(y.sum()) > 0 else y - 1


def hooked() -> nn.Module:
    model = Base()
    model.fired = []
    model.conv.register_forward_hook(lambda *_: model.fired.append("after"))
    model.conv.register_forward_pre_hook(lambda *_: model.fired.append("before"))
    return model


def frozen() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))
    model.train()
    model[1].eval()
    return model


def tied() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 3, 3, padding=1))
    model[2].weight = model[0].weight
    return model


def pruned() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
    prune.l1_unstructured(model[0], "weight", 0.5)
    return model


def with_attributes() -> nn.Module:
    model = Base()
    model.lock, model.log = threading.Lock(), logging.getLogger("planted")
    return model


def with_a_file() -> nn.Module:
    model = Base()
    model.file = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the model
    return model


def learning() -> nn.Module:
    model = Base()
    model.conv.weight.grad = torch.ones_like(model.conv.weight)
    model.conv.bias.requires_grad_(False)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    **{kind.__name__: kind for kind in (
        CountsInABuffer, CountsInPython, OverwritesItsInput, Draws, DrawsInPython, Caches, KeepsItsFeatures, Switches,
        AutocastInside, NoGradInside, Accumulates, Merges, WritesItsWeight, Branches,
    )},
    **{make.__name__: make for make in (hooked, frozen, tied, pruned, with_attributes, with_a_file, learning)},
    "weight_norm": lambda: nn.Sequential(weight_norm(nn.Conv2d(3, 4, 3))),
    "old_weight_norm": lambda: nn.Sequential(old_weight_norm(nn.Conv2d(3, 4, 3))),
    "spectral_norm": lambda: nn.Sequential(spectral_norm(nn.Conv2d(3, 4, 3))),
}  # fmt: skip


def state_of(model: nn.Module, given: tuple[torch.Tensor, ...]) -> dict[str, Any]:
    """Everything of a model and its arguments that a run could change, and then of the process."""
    found: dict[str, Any] = {}
    for kind, tensors in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in tensors:
            gradient = None if tensor.grad is None else tensor.grad.tolist()
            found[f"{kind} {name}"] = (id(tensor), tensor.tolist(), tensor._version, tensor.requires_grad, gradient)
    for index, tensor in enumerate(given):
        found[f"input {index}"] = (tensor.tolist(), tensor._version, tensor.requires_grad)
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            found[f"{path}.{name}"] = _comparable(value)
    return found | state_of_process()


def state_of_process() -> dict[str, Any]:
    """Random states, environment variables and flags."""
    numpy = np.random.get_state()
    return {
        "torch's random state": torch.get_rng_state().tolist(),
        "Python's random state": random.getstate(),
        "NumPy's random state": (numpy[1].tolist(), numpy[2:]),
        "environment": dict(os.environ),
        "grad mode": torch.is_grad_enabled(),
        "default dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.get_deterministic_debug_mode(),
        "cudnn": (torch.backends.cudnn.enabled, torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic),
        "precisions": (torch.backends.cudnn.conv.fp32_precision, torch.backends.mkldnn.conv.fp32_precision),
        "oneDNN": torch.backends.mkldnn.enabled,
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "warning filters": list(warnings.filters),
        "logging": (logging.root.manager.disable, logging.root.level, list(logging.root.handlers)),
        "path": list(sys.path),
        "streams": (id(sys.stdout), id(sys.stderr)),
        "global hooks": len(nn.modules.module._global_forward_hooks) + len(nn.modules.module._global_forward_pre_hooks),
    }


def _comparable(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return id(value), value.tolist(), value._version
    if isinstance(value, dict):
        return {name: _comparable(item) for name, item in value.items()}
    if isinstance(value, (list, set, tuple)):
        return [_comparable(item) for item in value]
    return value


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Names of what differs."""
    return [name for name in before | after if before.get(name, "") != after.get(name, "")]
