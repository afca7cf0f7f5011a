"""The device that a model is on, and whether a saved plan is for this machine and software."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from convoy.errors import InputError, PlanError
from convoy.measurement import detect_target
from convoy.plan import Plan
from convoy.target import Target
from convoy.user_warning import warn_user


def device_of(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """`cpu` or `cuda`: the device of the arguments and parameters; InputError if they are on several devices."""
    tensors = [t for t in pytree.tree_leaves((args, dict(kwargs))) if isinstance(t, torch.Tensor)]
    if not tensors:
        raise InputError("args", args, "at least one tensor", "Pass example inputs as a tuple: (x,).")
    held = (*model.parameters(), *model.buffers())
    for argument, those in (("args", tensors), ("model", held)):
        if any(isinstance(t, FakeTensor) for t in those):
            raise InputError(argument, "FakeTensor", "tensors with data", "Leave FakeTensorMode before this call.")
    if any(isinstance(t, (nn.UninitializedParameter, nn.UninitializedBuffer)) for t in held):
        raise InputError("model", type(model).__name__, "parameters with values", "Run it once: it has lazy layers.")
    found = sorted({t.device.type for t in (*tensors, *held)})
    if len(found) != 1:
        raise InputError("args", " and ".join(found), "model and inputs on one device", "Move both with .to(device).")
    if found[0] not in ("cpu", "cuda"):
        raise InputError("device", found[0], "cpu or cuda")
    return found[0]


def check_target(plan: Plan, target: Target) -> None:
    """Raise PlanError if a plan was made for another machine or software."""
    if plan.target.get("digest") != target.digest:
        made = f"{plan.target.get('name')} ({plan.target.get('digest')})"
        here = f"this machine and software, {target.name} ({target.digest})"
        raise PlanError("plan.target", made, here, "Tune here: `convoy optimize`.")


def warn_of_changes(plan: Plan, bound: Plan) -> None:
    """Warn the user if a saved plan runs differently here: in part on the baseline, or without a CUDA graph."""
    new = [note for note in bound.notes if note not in plan.notes]
    if new:
        more = f", and {len(new) - 1} more (see the plan's notes)" if len(new) > 1 else ""
        warn_user(f"the plan runs differently here: {new[0]}{more}; tune the model again")


def target_for(device: str) -> Target:
    """The target of a device: `cpu` or `cuda`."""
    return detect_target(device)
