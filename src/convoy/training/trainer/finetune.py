"""A short fine-tune that keeps masks: `fit`, with what was pruned staying pruned."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from convoy.capture.export import evaluation_mode
from convoy.errors import InputError
from convoy.pipeline.observer import Observer, ignore_progress
from convoy.prune.masks import masked
from convoy.training.trainer.fit import fit
from convoy.training.trainer.recipe import TrainingRecipe
from convoy.zoo import Dataset


@dataclass(frozen=True, slots=True)
class FinetuneSchedule:
    """How to fine-tune: stochastic gradient descent with momentum, the rate falling to 0 along half a cosine.

    The default rate is a tenth of what residual nets are trained with from the start, for the weights are nearly right.
    """

    epochs: int = 1
    batch: int = 128
    lr: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 1e-4
    seed: int = 0
    augment: bool = True

    def __post_init__(self) -> None:
        for name, least in (("epochs", 1), ("batch", 2)):  # a batch norm wants two values of a channel
            if getattr(self, name) < least:
                raise InputError(name, getattr(self, name), f"an integer of at least {least}")
        if not 0 < self.lr < float("inf"):
            raise InputError("lr", self.lr, "a positive number")


def finetune(
    model: nn.Module,
    masks: Mapping[str, torch.Tensor],
    images: Dataset,
    schedule: FinetuneSchedule,
    on_progress: Observer = ignore_progress,
) -> list[float]:
    """Train a pruned model on, what is pruned staying pruned; the mean loss of each epoch.

    PyTorch's own step runs: a fine-tune is too short to pay for tuning. The model's training flags are put back. The same
    seed gives the same weights, as far as the device's kernels give the same bits (on a CPU: with as many threads).

    Args:
        model: changed in place; on its device.
        masks: by parameter name; see `convoy.prune.masks.masked`.
        images: what to train on; labels lie below the model's number of outputs.
        schedule: how.
        on_progress: told of each step.

    Raises:
        InputError: a single image.
        ConvoyError: the loss became NaN or infinite; the weights are no use then.
    """
    if len(images) < 2:
        raise InputError("data", f"{len(images)} images", "at least 2 to train on")
    recipe = TrainingRecipe(
        epochs=schedule.epochs,
        batch=min(schedule.batch, len(images)),
        lr=schedule.lr,
        momentum=schedule.momentum,
        weight_decay=schedule.weight_decay,
        seed=schedule.seed,
        augment=schedule.augment,
        stock=True,
    )
    made = itertools.count(1)

    def count(message: str, done: int, total: int) -> None:
        del done  # of its epoch
        on_progress(f"fine-tuning, {message}", next(made), schedule.epochs * total)

    device = next(model.parameters()).device
    with (
        cast("Any", torch.random).fork_rng(devices=[device] if device.type == "cuda" else []),
        evaluation_mode(model),
        masked(model, masks),
    ):
        losses = [epoch.loss for epoch in fit(model, images, recipe, observer=count)]
        for parameter in model.parameters():
            parameter.grad = None
    return losses
