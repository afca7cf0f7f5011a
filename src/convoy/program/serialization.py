"""Copies and pickles of optimised modules and training steps.

A copy belongs to a copy of the stock module. Programs hold packed weights and nothing of the module, so a copy shares them. A
pickle holds the stock module, the plans as text, and the arguments' shapes: what is loaded binds the plans again, or runs the
stock module, with a warning, where the machine, the software or the device differs.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from typing import TYPE_CHECKING, Any, Final

from torch import nn

from convoy import plan as plans
from convoy.errors import InputError
from convoy.plan.plan import Plan
from convoy.program import calls
from convoy.program.serving import Served, Serving, Tuner
from convoy.program.step_program import StepProgram
from convoy.user_warning import warn_user

if TYPE_CHECKING:
    from convoy.program.module import OptimizedModule
    from convoy.program.step import TrainingStep

_RESTORED: Final = frozenset({"_serving", "_modules"})
_LONGEST_REASON: Final = 300
"""Characters that are shown of why a plan could not be bound."""


@dataclasses.dataclass(frozen=True, slots=True)
class SavedProgram:
    """A program in a pickle.

    Attributes:
        plan: its plan, as JSON.
        example: the arguments that it was made for.
        signature: of such a call.
        by_name: the signature of the arguments by name.
        autocast: where autocast was on.
    """

    plan: str
    example: calls.Example
    signature: calls.Signature
    by_name: calls.Signature | None
    autocast: calls.Autocast


def copy_module(module: OptimizedModule, memo: dict[int, Any]) -> OptimizedModule:
    """A deep copy, bound to its own copy of the stock module."""
    made = module.__class__.__new__(module.__class__)
    memo[id(module)] = made
    nn.Module.__init__(made)
    model = copy.deepcopy(module.model, memo)
    memo[id(module._serving)] = module._serving.copied(model)
    made.__dict__.update(copy.deepcopy(module.__dict__, memo))
    return made


def reduce_module(module: OptimizedModule) -> tuple[Any, ...]:
    """What a pickle holds; `restore_module` is the inverse."""
    served = list(module._serving.tuned.values())
    saved = [
        SavedProgram(_text(one.program.plan), one.example, one.signature, one.by_name, one.program.autocast)
        for one in served
    ]
    attributes = {name: value for name, value in module.__dict__.items() if name not in _RESTORED}
    check = module._serving.check
    return restore_module, (type(module), module.model, saved, module._serving.tuner, check, attributes)


def restore_module(
    kind: type[OptimizedModule],
    model: nn.Module,
    saved: list[SavedProgram],
    tuner: Tuner,
    check: str,
    attributes: dict[str, Any],
) -> OptimizedModule:
    """The module of a pickle. A plan that cannot be bound here is replaced by the stock module, and one warning says why."""
    from convoy.program.module import Program

    made = kind.__new__(kind)
    nn.Module.__init__(made)
    made.model = model
    serving = made._serving = Serving(model, tuner, check)
    refused = ""
    for one in saved:
        plan = _plan(one.plan)
        program = Program(plan, None, None)
        if not plan.baseline:
            try:
                args, kwargs = one.example.zeros()
                with calls.autocast_as(one.autocast):
                    program = tuner(model, args, kwargs, plan)
            except Exception as error:  # a device, a library or an engine that is not there may raise anything
                refused = f"{type(error).__name__}: {error}"[:_LONGEST_REASON]
                program = Program(unbound(plan, refused), None, None)
        program.autocast = one.autocast
        serving.put(Served(program, one.example, one.signature, one.by_name))
    made.__dict__.update(attributes)
    if refused:
        warn_user(f"a loaded plan cannot be bound here: the stock module runs; call .refresh() to tune it ({refused})")
    return made


def copy_step(step: TrainingStep, memo: dict[int, Any]) -> TrainingStep:
    """A deep copy with a model, a loss and an optimizer of its own; a process group and its programs are shared."""
    model = copy.deepcopy(step.model, memo)
    loss_fn = copy.deepcopy(step.loss_fn, memo)
    optimizer = copy.deepcopy(step.optimizer, memo)
    options = dataclasses.replace(step.options, scaler=copy.deepcopy(step.options.scaler, memo))
    program, capture = step.program, step.program.capture
    if capture is not None:  # tensors that the model's own code holds were copied with it
        lifted = tuple(memo.get(id(tensor), tensor) for tensor in capture.lifted)
        program = dataclasses.replace(program, capture=dataclasses.replace(capture, lifted=lifted))
    made = type(step)(model, loss_fn, optimizer, options, program)
    memo[id(step)] = made
    made.follow(step)
    return made


def reduce_step(step: TrainingStep) -> tuple[Any, ...]:
    """What a pickle holds; `restore_step` is the inverse.

    Raises:
        InputError: the step averages gradients over a process group, which lives in its processes alone.
    """
    if step.group is not None:
        todo = "Save the model's and the optimizer's state_dict, and the plan with step.save()."
        raise InputError("step", "a step of a process group", "a step of one process", todo)
    program = step.program
    saved = (_text(program.plan), program.signature, program.amp, program.origin)
    return restore_step, (type(step), step.model, step.loss_fn, step.optimizer, step.options, saved)


def restore_step(
    kind: type[TrainingStep], model: nn.Module, loss_fn: Any, optimizer: Any, options: Any, saved: tuple[Any, ...]
) -> TrainingStep:
    """The step of a pickle; PyTorch's own step, with one warning, where its plan cannot be bound."""
    text, signature, amp, origin = saved
    plan = _plan(text)
    if not plan.baseline and origin is not None:
        try:
            return origin(model, loss_fn, optimizer, options, plan)
        except Exception as error:  # a device, a library or an engine that is not there may raise anything
            refused = f"{type(error).__name__}: {error}"[:_LONGEST_REASON]
            warn_user(f"a loaded plan cannot be bound here: PyTorch's own step runs; call training_step ({refused})")
            plan = unbound(plan, refused)
    return kind(model, loss_fn, optimizer, options, StepProgram(plan, None, None, signature, amp, origin))


def unbound(plan: Plan, reason: str) -> Plan:
    """The baseline in place of a plan that cannot be bound, with a note."""
    note = f"the plan could not be bound when it was loaded: {reason}"
    return dataclasses.replace(plan, baseline=True, steps=(), notes=(*plan.notes, note))


def _text(plan: Plan) -> str:
    return json.dumps(plans.to_dict(plan))


def _plan(text: str) -> Plan:
    return plans.from_dict(json.loads(text))
