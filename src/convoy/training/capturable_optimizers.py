"""Optimizers in a capture: what an update must be told so that it asks nothing of the host, and is told for the capture alone."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
"""Optimizers of PyTorch that have a fused form for a GPU, which takes a gradient scaler's verdict without asking the host."""


def why_not_capturable(optimizer: torch.optim.Optimizer, *, scaled: bool) -> str:
    """Why an optimizer's update cannot be captured; empty where it can.

    PyTorch marks the optimizers whose update waits for no device with a `capturable` option; SGD needs none. Whether a scaled
    step is taken is decided on the device by the fused forms alone.
    """
    name = type(optimizer).__name__
    fused = type(optimizer) in FUSED and not any(group.get("differentiable") for group in optimizer.param_groups)
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return f"{name} has hooks, which Python must call"
    if scaled and not fused:
        return f"of PyTorch's {name} the host decides whether a scaled step is taken"
    if fused or all("capturable" in group for group in optimizer.param_groups):
        return ""
    return f"PyTorch's {name} cannot be captured"


def has_state(optimizer: torch.optim.Optimizer, learned: Sequence[torch.Tensor]) -> bool:
    """Whether an update has been made, so that the state is there which further updates change in place.

    A scaler may skip the first steps: what an update does only once must not become part of a graph.

    Args:
        optimizer: whose state.
        learned: the parameters that get a gradient; one that the optimizer does not know has no state.
    """
    wanted = {id(parameter) for parameter in learned}
    for group in optimizer.param_groups:
        if isinstance(optimizer, torch.optim.SGD) and not group["momentum"]:
            continue
        for parameter in group["params"]:
            kept = optimizer.state.get(parameter, {}).values()
            if id(parameter) in wanted and not any(isinstance(value, torch.Tensor) for value in kept):
                return False
    return True


def options(optimizer: torch.optim.Optimizer) -> list[dict[str, object]]:
    """Every option but the learning rate and the parameters: what a graph holds fixed."""
    return [{k: v for k, v in g.items() if k not in ("lr", "params", "initial_lr")} for g in optimizer.param_groups]


@contextmanager
def capturable(
    optimizer: torch.optim.Optimizer, rates: Sequence[torch.Tensor], scaler: torch.amp.GradScaler | None
) -> Generator[None]:
    """Let an optimizer be captured: learning rates are tensors, its form is one that never waits for the device.

    SGD and scaled optimizers are given their fused form: the other forms of SGD ask the host for a learning rate that is a
    tensor. So are Adam and AdamW where the user chose no form. All options are put back, so that what runs outside of the graph,
    schedules and checkpoints find them as they were; counters of steps stay on the device, where either form takes them.

    Args:
        optimizer: its state is there already (`has_state`).
        rates: a tensor on the device for each parameter group.
        scaler: a gradient scaler that is on, or None.
    """
    before = [dict(group) for group in optimizer.param_groups]
    scaled = getattr(optimizer, "_step_supports_amp_scaling", None)
    try:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
            if "capturable" in group:
                group["capturable"] = True
            if type(optimizer) in FUSED and (_needs_fused(optimizer, scaler) or _left_open(group)):
                group["fused"], group["foreach"] = True, False
        _move_counters(optimizer, rates[0].device)
        if scaler is not None:
            optimizer._step_supports_amp_scaling = True  # pyright: ignore[reportAttributeAccessIssue]
        yield
    except BaseException:  # everything, an interrupt too: the optimizer must not keep the capture's state
        _forget_scaling(optimizer, scaler)
        raise
    finally:
        for group, old in zip(optimizer.param_groups, before, strict=True):
            group.update({name: old[name] for name in ("lr", "capturable", "fused", "foreach") if name in old})
        if scaler is not None and scaled is None:
            del optimizer._step_supports_amp_scaling  # pyright: ignore[reportAttributeAccessIssue]


def _needs_fused(optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None) -> bool:
    return scaler is not None or isinstance(optimizer, torch.optim.SGD)


def _left_open(group: dict[str, Any]) -> bool:
    return group.get("fused") is None and group.get("foreach") is None


def _move_counters(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Counters of steps to the device, in the dtype that the fused forms want."""
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.device != device:
                state[name] = value.to(device, torch.float32) if name == "step" else value.to(device)


def _forget_scaling(optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None) -> None:
    """Undo what a capture that failed half-way left: a scaler that takes the gradients for unscaled."""
    for name in ("grad_scale", "found_inf"):
        if hasattr(optimizer, name):
            delattr(optimizer, name)
    if scaler is not None:
        scaler._per_optimizer_states.clear()
