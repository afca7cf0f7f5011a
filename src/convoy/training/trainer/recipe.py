"""Recipe: how a classifier is trained, epoch by epoch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import torch

from convoy.errors import InputError


@dataclass(frozen=True, slots=True)
class TrainingRecipe:
    """How to train: stochastic gradient descent with momentum, the rate falling to 0 along half a cosine.

    Attributes:
        epochs: passes over the images.
        batch: images in a step of one process.
        lr: learning rate of the first step.
        momentum: of the optimizer.
        weight_decay: of the optimizer.
        seed: of the order of the images, their augmentation and dropout.
        augment: whether images are varied from epoch to epoch.
        amp: dtype of autocast, or None.
        clip_grad_norm: largest joint L2 norm of the gradients, or None.
        accumulate: batches to an update; those at the end of an epoch that do not fill one are left out.
        stock: use PyTorch's own step.
        plan: replay this saved plan.
        checkpoint: write the state to this file, or None.
        every: steps from checkpoint to checkpoint; 0: at the end of each epoch alone. One that falls due before an update is
            whole is written after it.
        resume: go on from the checkpoint where it is there.
    """

    epochs: int = 1
    batch: int = 128
    lr: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 1e-4
    seed: int = 0
    augment: bool = True
    amp: torch.dtype | None = None
    clip_grad_norm: float | None = None
    accumulate: int = 1
    stock: bool = False
    plan: Path | None = None
    checkpoint: Path | None = None
    every: int = 0
    resume: bool = False

    def __post_init__(self) -> None:
        for name in ("epochs", "batch", "accumulate"):
            if getattr(self, name) < 1:
                raise InputError(name, getattr(self, name), "an integer of at least 1")
        if self.every < 0:
            raise InputError("every", self.every, "an integer of at least 0")
        if not 0 < self.lr < float("inf"):
            raise InputError("lr", self.lr, "a positive number")
        for name in ("momentum", "weight_decay"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise InputError(name, getattr(self, name), "a number of at least 0")
        if self.clip_grad_norm is not None and not 0 < self.clip_grad_norm < float("inf"):
            raise InputError("clip_grad_norm", self.clip_grad_norm, "a positive number, or None")
        if self.checkpoint is None and (self.resume or self.every):
            raise InputError("checkpoint", None, "a file: `resume` and `every` need one")


def with_amp(recipe: TrainingRecipe, word: str | None) -> TrainingRecipe:
    """The recipe under autocast with a dtype's word; InputError for one that autocast does not take."""
    if word is None:
        return recipe
    if word != "bf16":
        raise InputError("amp", word, "bf16, or nothing", "fp16 needs a gradient scaler: see convoy.training_step.")
    return dataclasses.replace(recipe, amp=torch.bfloat16)
