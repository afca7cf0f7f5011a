"""What a pickle of a training step holds of its program: the plan as text. A loaded step binds the plan again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from convoy.errors import InputError
from convoy.program.serialization import LONGEST_REASON, plan_of, plan_text, unbound
from convoy.training.step_program import StepOptions, StepProgram
from convoy.user_warning import warn_user


@dataclass(frozen=True, slots=True)
class SavedStep:
    """A step's program in a pickle.

    Attributes:
        plan: its plan, as JSON.
        signature: signature of its batches.
        amp: dtype of autocast, or None.
        origin: binds the plan again (`StepProgram.origin`).
    """

    plan: str
    signature: tuple[Any, ...]
    amp: torch.dtype | None
    origin: Callable[..., Any] | None


def saved_step(program: StepProgram, group: object) -> SavedStep:
    """What a pickle holds of a step's program; `bound_again` is the inverse.

    Raises:
        InputError: the step averages gradients over a process group, which belongs to its processes.
    """
    if group is not None:
        todo = "Save the model's and the optimizer's state_dict, and the plan with step.save()."
        raise InputError("step", "a step of a process group", "a step of one process", todo)
    return SavedStep(plan_text(program.plan), program.signature, program.amp, program.origin)


def bound_again(
    saved: SavedStep, model: nn.Module, loss_fn: object, optimizer: torch.optim.Optimizer, options: StepOptions
) -> tuple[Any, StepProgram]:
    """The step of a saved plan, or None if it cannot be bound here, with one warning; and the program of PyTorch's own step."""
    plan = plan_of(saved.plan)
    made: Any = None
    if not plan.baseline and saved.origin is not None:
        try:
            made = saved.origin(model, loss_fn, optimizer, options, plan)
        except Exception as error:  # a missing device, library or engine may raise anything
            refused = f"{type(error).__name__}: {error}"[:LONGEST_REASON]
            warn_user(f"a loaded plan cannot be bound here: PyTorch's own step runs; call training_step ({refused})")
            plan = unbound(plan, refused)
    return made, StepProgram(plan, None, None, saved.signature, saved.amp, saved.origin)
