"""Copies and pickles of training steps: a copy has a model, a loss and an optimizer of its own; a pickle binds its plan again."""

from __future__ import annotations

import copy
import dataclasses
from typing import TYPE_CHECKING, Any

from torch import nn

from convoy.errors import InputError
from convoy.program.serialization import LONGEST_REASON, plan_of, plan_text, unbound
from convoy.training.step_program import StepProgram
from convoy.user_warning import warn_user

if TYPE_CHECKING:
    from convoy.training.step import TrainingStep


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
    saved = (plan_text(program.plan), program.signature, program.amp, program.origin)
    return restore_step, (type(step), step.model, step.loss_fn, step.optimizer, step.options, saved)


def restore_step(
    kind: type[TrainingStep], model: nn.Module, loss_fn: Any, optimizer: Any, options: Any, saved: tuple[Any, ...]
) -> TrainingStep:
    """The step of a pickle; PyTorch's own step, with one warning, where its plan cannot be bound."""
    text, signature, amp, origin = saved
    plan = plan_of(text)
    if not plan.baseline and origin is not None:
        try:
            return origin(model, loss_fn, optimizer, options, plan)
        except Exception as error:  # a device, a library or an engine that is not there may raise anything
            refused = f"{type(error).__name__}: {error}"[:LONGEST_REASON]
            warn_user(f"a loaded plan cannot be bound here: PyTorch's own step runs; call training_step ({refused})")
            plan = unbound(plan, refused)
    return kind(model, loss_fn, optimizer, options, StepProgram(plan, None, None, signature, amp, origin))
