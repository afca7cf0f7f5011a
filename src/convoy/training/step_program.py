"""What a training step is made of: its options, and the program for batches of one signature."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from convoy.capture import TrainingCapture
from convoy.plan.plan import Plan
from convoy.program.eager import EagerProgram
from convoy.training.batch_form import InputForm


@dataclass(frozen=True, slots=True)
class StepOptions:
    """What belongs to a step besides the model, its loss and the optimizer.

    Attributes:
        amp: dtype of autocast, or None.
        scaler: a gradient scaler for fp16, or None.
        clip_grad_norm: largest joint L2 norm of the gradients, or None.
        accumulate: micro-batches to an update.
        group: process group to average gradients over, or None.
        overlap: whether gradients travel while the backward pass goes on; the averages have the same bits either way.
        early_updates: whether a captured step updates parameters while the backward pass goes on; the same bits either way. None:
            where their update is a large part of the step (`convoy.training.overlapped_updates.EARLY_BYTES_US`).
        gradients: how gradients are sent to the other processes (`convoy.training.allreduce.sent_gradients.GRADIENTS`); None: in
            their own dtype.
    """

    amp: torch.dtype | None = None
    scaler: torch.amp.GradScaler | None = None
    clip_grad_norm: float | None = None
    accumulate: int = 1
    group: Any = None
    overlap: bool = True
    early_updates: bool | None = None
    gradients: str | None = None

    def given(self, batch: tuple[Any, ...]) -> tuple[Any, ...]:
        """A batch as the loss module takes it: with a scaler, its factor of the loss stands behind, on the batch's device."""
        if self.scaler is None:
            return batch
        found = (leaf.device for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor))
        return (*batch, self.scaler.scale(torch.ones((), device=next(found, torch.device("cpu")))))


@dataclass(frozen=True, slots=True)
class StepProgram:
    """Loss, gradients and buffers of batches of one signature.

    Attributes:
        plan: what it runs.
        capture: the graph's inputs and outputs by name; None where the step could not be captured.
        runnable: (parameters, buffers, batch) → (loss, gradients, new buffers); None where stock PyTorch runs.
        signature: the batches that it serves (`convoy.capture.batch`).
        amp: dtype of autocast, the option's or that of an autocast region around `training_step`; None without.
        origin: (model, loss, optimizer, options, plan) → a step of that plan; what a pickle binds again with.
        form: how the example batch holds the model's inputs; None where stock PyTorch runs.
        default_dtype: PyTorch's when the program was made: tensors that the model makes in its code may have it.
    """

    plan: Plan
    capture: TrainingCapture | None
    runnable: EagerProgram | None
    signature: tuple[Any, ...]
    amp: torch.dtype | None = None
    origin: Callable[..., Any] | None = None
    form: InputForm | None = None
    default_dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
