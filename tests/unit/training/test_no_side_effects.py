"""training_step changes nothing of the user's: every state is afterwards as it was, over nasty modules and losses."""

from __future__ import annotations

import logging
import os
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune

import convoy
from tests.unit.training.training_pairs import Net, images, labels

Loss = Callable[..., torch.Tensor]


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> convoy.Settings:
    folder = tmp_path_factory.mktemp("alone")
    return convoy.Settings(
        effort="none", isolate=False, solver="baseline", only_engines=("aten",), db=folder / "perf.db"
    )


class Counting(Net):
    """Counts in a buffer, in Python, in a list, in a class; overwrites its input; draws from three generators."""

    total = 0

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frames", torch.zeros((), dtype=torch.long))
        self.calls, self.shapes, self.last = 0, [], None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.frames += 1
        self.calls += 1
        self.shapes.append(tuple(x.shape))
        self.last = x.detach().mean()
        x += 0.01 * torch.rand(()) + 0.01 * random.random() + 0.01 * float(np.random.rand())
        return super().forward(x)


class Frozen(Net):
    """Batch norms of both modes, a frozen layer, dropout that is off inside a model in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.other, self.drop = nn.BatchNorm2d(8), nn.Dropout(0.5)
        self.bn.eval()
        self.drop.eval()
        self.conv.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.drop(torch.relu(self.other(self.bn(self.conv(x)))).mean((2, 3))))


class Replacing(Net):
    """Replaces a buffer; switches flags of its own while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.bn.train(not self.bn.training)
        with torch.no_grad():
            self.mean = self.mean + 1
        out = super().forward(x)
        self.bn.train(not self.bn.training)
        return out - self.mean


def pruned() -> nn.Module:
    net = Net()
    prune.random_unstructured(net.conv, "weight", 0.5)
    return net


def hooked() -> nn.Module:
    net = Net()
    net.fired = []  # type: ignore[assignment]
    net.conv.register_forward_hook(lambda *_: net.fired.append(1))
    net.fc.weight.register_hook(lambda _: net.fired.append(2))
    return net


class TeacherLoss(nn.Module):
    """A module with a net in training mode, a learned weight, a counter, a list."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher, self.log, self.seen = Net(), nn.Parameter(torch.zeros(())), []

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        wanted = self.teacher(images()).detach()
        self.seen.append(len(target))
        return F.cross_entropy(output, target) * torch.exp(-self.log) + F.mse_loss(output, wanted) + self.log


HISTORY: list[torch.Tensor] = []
TEACHER = Net()
WEIGHT = torch.rand(5)


def global_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    HISTORY.append(output)
    WEIGHT.mul_(0.99)
    return F.cross_entropy(output, target, weight=WEIGHT) + F.mse_loss(output, TEACHER(images()).detach())


def moving_teacher(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output, target, weight=WEIGHT) + F.mse_loss(output, TEACHER(images()).detach())


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Loss]]] = {
    "plain": (Net, lambda: F.cross_entropy),
    "counting": (Counting, lambda: F.cross_entropy),
    "frozen": (Frozen, lambda: F.cross_entropy),
    "replacing": (Replacing, lambda: F.cross_entropy),
    "pruned": (pruned, lambda: F.cross_entropy),
    "spectral_norm": (
        lambda: nn.Sequential(nn.utils.spectral_norm(Net().conv), Net().bn, nn.Flatten(), nn.Linear(392, 5)),
        lambda: F.cross_entropy,
    ),
    "hooked": (hooked, lambda: F.cross_entropy),
    "loss with a teacher": (Net, TeacherLoss),
    "loss that writes": (Net, lambda: global_loss),
    "loss with a teacher that moves": (Net, lambda: moving_teacher),
}


def tensors(held: dict[str, torch.Tensor]) -> dict[str, tuple[Any, ...]]:
    """Identity, version, flags and values."""
    return {name: (id(t), t._version, t.requires_grad, t.stride(), t.detach().clone()) for name, t in held.items()}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return bool((one == other).all())
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one is other or one == other)


def module_states(module: nn.Module) -> dict[str, Any]:
    """All that a module holds."""
    held = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    skipped = ("_parameters", "_buffers", "_modules")
    attributes = {
        f"{name}.{key}": list(value.values())
        if key.endswith("hooks")
        else list(value)
        if isinstance(value, list)
        else value
        for name, inner in module.named_modules()
        for key, value in vars(inner).items()
        if key not in skipped and not isinstance(value, torch.Tensor)
    }
    gradients = {n: (id(p.grad), None if p.grad is None else p.grad.clone()) for n, p in module.named_parameters()}
    return {"tensors": tensors(held), "attributes": attributes, "gradients": gradients}


def states(
    model: nn.Module, loss: Any, optimizer: torch.optim.Optimizer, batch: tuple[torch.Tensor, ...]
) -> dict[str, Any]:
    """Everything that is the user's or the process's."""
    return {
        "model": module_states(model),
        "loss": module_states(loss) if isinstance(loss, nn.Module) else None,
        "optimizer": optimizer.state_dict(),
        "hooks": [list(optimizer._optimizer_step_pre_hooks), list(optimizer._optimizer_step_post_hooks)],
        "batch": tensors({str(index): t for index, t in enumerate(batch)}),
        "globals": (len(HISTORY), tensors({"weight": WEIGHT}), module_states(TEACHER), Counting.total),
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "environment": dict(os.environ),
        "flags": (
            torch.is_grad_enabled(), torch.get_num_threads(), torch.backends.cudnn.benchmark, torch.get_default_dtype(),
            torch.is_autocast_enabled("cpu"), torch.are_deterministic_algorithms_enabled(), logging.root.manager.disable,
            list(warnings.filters),
        ),
        "module hooks": [len(getattr(nn.modules.module, f"_global_{kind}_hooks")) for kind in ("forward", "forward_pre")],
    }  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_every_state_is_afterwards_as_it_was(name: str, settings: convoy.Settings):
    make, make_loss = CASES[name]
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)
    model, loss = make(), make_loss()
    parameters = [*model.parameters(), *(loss.parameters() if isinstance(loss, nn.Module) else [])]
    optimizer = torch.optim.Adam([p for p in parameters if p.requires_grad], lr=0.01)
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 0.5) if parameter.requires_grad else None
    optimizer.step()
    batch = images(), labels()
    before = states(model, loss, optimizer, batch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before["flags"] = (*before["flags"][:-1], list(warnings.filters))
        convoy.training_step(model, loss, optimizer, batch, settings=settings)
        after = states(model, loss, optimizer, batch)
    for kind, value in before.items():
        assert same(value, after[kind]), kind
