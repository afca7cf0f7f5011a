"""StepUpdate: what ends a training step, when all gradients are there: they are averaged, unscaled, clipped and applied."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from convoy.training.allreduce.gradient_allreduce import allreduce_gradients, clip
from convoy.training.allreduce.sent_gradients import make_allreduce
from convoy.training.step_program import StepOptions


class StepUpdate:
    """The update of a step's parameters.

    Args:
        optimizer: any that needs no closure.
        options: scaler, clipping, process group.
        device: where the gradients lie.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, options: StepOptions, device: torch.device) -> None:
        self._optimizer, self._scaler, self._clip_norm = optimizer, options.scaler, options.clip_grad_norm
        group = options.group
        self.averages = None if group is None else make_allreduce(group, device, options.gradients)

    def __call__(self, learned: Sequence[torch.Tensor], *, averaged: bool = False) -> None:
        """Average, unscale, clip, step; `averaged` gradients are averages already."""
        if self.averages is not None and not averaged:
            allreduce_gradients([p.grad for p in learned if p.grad is not None], self.averages)
        if self._scaler is not None:
            self._scaler.unscale_(self._optimizer)
        if self._clip_norm is not None:
            clip(learned, self._clip_norm)
        if self._scaler is None:
            self._optimizer.step()
        else:
            self._scaler.step(self._optimizer)
            self._scaler.update()

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The gradient scaler, where there is one that is on."""
        return self._scaler if self._scaler is not None and self._scaler.is_enabled() else None

    @property
    def streams(self) -> tuple[torch.cuda.Stream, ...]:
        """Streams that gradients travel on."""
        return () if self.averages is None else self.averages.streams
