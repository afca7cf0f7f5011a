"""Updates that ask nothing of the host, and what a captured step rests on: shown on a CPU by refusing every host read."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from convoy.program.state.module_state import ModuleState
from convoy.training.allreduce.gradient_allreduce import clip
from convoy.training.capturable_optimizers import capturable, has_state, options, why_not_capturable
from convoy.training.capture_guard import CaptureGuard

Maker = Callable[[nn.Module], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Maker] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-2, nesterov=True),
    "plain sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    "foreach sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, foreach=True),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.01),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, fused=True),
}


class NoHostReads(TorchDispatchMode):
    """Fails where Python asks for a tensor's value: what no capture allows."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if func is torch.ops.aten._local_scalar_dense.default:
            raise AssertionError("the host asks for a value")
        return func(*args, **(kwargs or {}))


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 2))


def give_gradients(model: nn.Module, step: int, factor: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator) * factor


def update(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None) -> None:
    if scaler is not None:
        scaler.scale(torch.ones(()))  # as a step does, which makes the scale's tensor
        scaler.unscale_(optimizer)
    clip(list(model.parameters()), 3.0)
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()


def rates_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [torch.tensor(float(group["lr"])) for group in optimizer.param_groups]


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_updates_are_those_of_pytorch_and_ask_nothing_of_the_host(name: str, scaled: bool):
    models = [net(), net()]
    ours, theirs = (OPTIMIZERS[name](model) for model in models)
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0) if scaled else None for _ in models]
    factor = 8.0 if scaled else 1.0
    for model, optimizer, scaler in zip(models, (ours, theirs), scalers, strict=True):
        give_gradients(model, 0, factor)
        update(model, optimizer, scaler)
    before = copy.deepcopy([{k: v for k, v in g.items() if k != "params"} for g in ours.param_groups])
    for step in (1, 2, 3):
        for model in models:
            give_gradients(model, step, float("inf") if scaled and step == 2 else factor)
        with capturable(ours, rates_of(ours), scalers[0]), NoHostReads():
            update(models[0], ours, scalers[0])
        update(models[1], theirs, scalers[1])
        if scaled and step == 2:
            factor /= 2  # the scale fell, in both
    assert [{k: v for k, v in g.items() if k != "params"} for g in ours.param_groups] == before
    assert hasattr(ours, "_step_supports_amp_scaling") == (name == "adamw")
    for found, wanted in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    if scaled:
        assert scalers[0].get_scale() == scalers[1].get_scale() == 4.0


def test_without_that_the_host_is_asked():
    """The test above sees a host read where there is one."""
    model = net()
    optimizer, scaler = OPTIMIZERS["sgd"](model), torch.amp.GradScaler("cpu", init_scale=8.0)
    give_gradients(model, 0)
    with pytest.raises(AssertionError, match="the host asks"), NoHostReads():
        update(model, optimizer, scaler)


def test_a_capture_that_fails_leaves_the_scaler_and_the_optimizer_as_they_were():
    model = net()
    optimizer, scaler = OPTIMIZERS["sgd"](model), torch.amp.GradScaler("cpu", init_scale=8.0)
    give_gradients(model, 0, 8.0)
    update(model, optimizer, scaler)
    give_gradients(model, 1, 8.0)

    def fail() -> None:
        with capturable(optimizer, rates_of(optimizer), scaler):
            scaler.unscale_(optimizer)
            optimizer.grad_scale = torch.ones(())
            raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        fail()
    assert not hasattr(optimizer, "grad_scale")
    assert optimizer.param_groups[0]["lr"] == 0.1
    give_gradients(model, 1, 8.0)
    update(model, optimizer, scaler)  # were it taken for unscaled, PyTorch would refuse


def test_state_is_there_after_a_step_that_was_taken():
    model = net()
    learned = list(model.parameters())
    for name, maker in OPTIMIZERS.items():
        optimizer = maker(model)
        assert has_state(optimizer, learned) == (name == "plain sgd")
        give_gradients(model, 0)
        optimizer.step()
        assert has_state(optimizer, learned)
    frozen = torch.optim.SGD([*model[0].parameters(), nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)
    frozen.step()
    assert has_state(frozen, learned)  # parameters that are not learned, or not the optimizer's, have none


@pytest.mark.parametrize(
    ("maker", "scaled", "words"),
    [
        (torch.optim.SGD, True, ""),
        (torch.optim.Adam, True, ""),
        (torch.optim.RMSprop, False, ""),
        (torch.optim.RMSprop, True, "the host decides"),
        (torch.optim.Adagrad, False, "cannot be captured"),
    ],
)
def test_what_cannot_be_captured_is_named(maker: Any, scaled: bool, words: str):
    reason = why_not_capturable(maker(net().parameters(), lr=0.1), scaled=scaled)
    assert bool(reason) == bool(words)
    assert words in reason


def test_hooks_on_an_optimizer_keep_it_out_of_a_graph():
    optimizer = torch.optim.SGD(net().parameters(), lr=0.1)
    handle = optimizer.register_step_post_hook(lambda *_: None)
    assert "hooks" in why_not_capturable(optimizer, scaled=False)
    handle.remove()
    assert why_not_capturable(optimizer, scaled=False) == ""


def changes(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Callable[[], object]]:
    weight = model[0].weight
    return {
        "another place": lambda: setattr(weight, "data", weight.data.clone()),
        "another parameter": lambda: setattr(model[3], "bias", nn.Parameter(torch.zeros(2))),
        "another buffer": lambda: setattr(model[1], "running_mean", torch.zeros(3)),
        "another module": lambda: model.__setitem__(3, nn.Linear(12, 2)),
        "an option": lambda: optimizer.param_groups[0].update(momentum=0.5),
        "another state": lambda: optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict())),
        "a tensor of the state": lambda: optimizer.state[weight].update(momentum_buffer=torch.zeros_like(weight)),
    }


@pytest.mark.parametrize("change", list(changes(net(), None)))  # type: ignore[arg-type]
def test_what_a_graph_rests_on_is_watched(change: str):
    model = net()
    optimizer = OPTIMIZERS["sgd"](model)
    give_gradients(model, 0)
    optimizer.step()
    guard = CaptureGuard(model, optimizer)
    give_gradients(model, 1)
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.5
    assert not guard.is_invalid()
    changes(model, optimizer)[change]()
    assert guard.is_invalid()
    assert not CaptureGuard(model, optimizer).is_invalid()


def test_flags_are_watched():
    model = net()
    state = ModuleState(model, learned=model)
    for index, change in itertools.product(range(2), (True, False)):
        (model[1].train if index else model[3].weight.requires_grad_)(not change)
        assert (state.change() is not None) == change


def test_options_leave_out_what_may_change():
    (found,) = options(OPTIMIZERS["sgd"](net()))
    assert {"momentum", "nesterov"} <= set(found)
    assert not {"lr", "params"} & set(found)
