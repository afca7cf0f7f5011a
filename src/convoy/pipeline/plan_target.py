"""The device that a model is on, and whether a saved plan is for this machine and software."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from convoy.engines.torch_operators import DTYPES
from convoy.engines.triton.triton_ahead import prepare_triton
from convoy.errors import InputError, PlanError
from convoy.measurement import detect_target
from convoy.plan import Plan
from convoy.problem import TensorSpec
from convoy.program.calls import map_tensors, tensors_of
from convoy.target import Target
from convoy.user_warning import warn_user

_PLAIN: Final = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def device_of(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """`cpu` or `cuda`: the device of the arguments and parameters; InputError if they are on several devices.

    An argument of an unknown class, such as a data class, may hold tensors: then the parameters tell the device.
    """
    leaves = pytree.tree_leaves((args, dict(kwargs)))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    held = (*model.parameters(), *model.buffers())
    if not tensors and (not held or all(isinstance(leaf, _PLAIN) for leaf in leaves)):
        raise InputError("args", args, "at least one tensor", "Pass example inputs as a tuple: (x,).")
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
    """The target of a device, `cpu` or `cuda`. For a GPU Triton gets ready meanwhile, while the model is captured."""
    target = detect_target(device)
    if target.device == "cuda":
        prepare_triton()
    return target


def arguments_of(plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a plan's shapes, nested as those of another plan of the same model.

    Raises:
        PlanError: the plan has another number of inputs.
    """
    tensors = list(tensors_of((args, kwargs)))
    if len(plan.inputs) != len(tensors):
        raise PlanError("plan.inputs", plan.inputs, f"{len(tensors)} inputs, as in the first plan")
    zeros = iter([zeros_of(text, like.device) for text, like in zip(plan.inputs, tensors, strict=True)])
    others: Any = map_tensors(lambda _: next(zeros), (args, kwargs))
    return others


def zeros_of(spec: str, device: torch.device) -> torch.Tensor:
    """A tensor of zeros of a spec's shape and dtype, to capture with.

    Raises:
        PlanError: the tensor is too large.
    """
    found = TensorSpec.parse(spec)
    try:
        if found.size_bytes <= MOST_INPUT_BYTES:
            return torch.zeros(found.shape, dtype=DTYPES[found.dtype], device=device)
    except (RuntimeError, MemoryError) as error:
        raise PlanError("plan.inputs", spec, "inputs that fit into memory", str(error).split("\n")[0]) from error
    raise PlanError("plan.inputs", spec, f"inputs of at most {MOST_INPUT_BYTES >> 30} GiB")


MOST_INPUT_BYTES: Final = 16 << 30
"""Largest input that a plan's file may name: more than any batch of images has."""
