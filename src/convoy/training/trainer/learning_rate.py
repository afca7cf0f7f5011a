"""The learning rate of a training: half a cosine from its first value to 0, along the epochs that were asked for."""

from __future__ import annotations

import math

import torch

from convoy.training.trainer.recipe import TrainingRecipe


def cosine_rate(lr: float, done: int, total: int) -> float:
    """The rate of the next update.

    Args:
        lr: rate of the first update.
        done: updates that are made.
        total: updates of the whole training.
    """
    return lr * (1 + math.cos(math.pi * min(done / total, 1.0))) / 2


def follow_recipe(
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.CosineAnnealingLR,
    recipe: TrainingRecipe,
    done: int,
    total: int,
) -> None:
    """Give an optimizer and its schedule, read from a checkpoint, the options of a recipe; what is the same stays to the bit.

    Args:
        optimizer: the training's.
        schedule: over it.
        recipe: what is asked for now: learning rate, momentum, weight decay.
        done: updates that are made.
        total: updates of the whole training, as asked for now.
    """
    for group in optimizer.param_groups:
        group["momentum"], group["weight_decay"] = recipe.momentum, recipe.weight_decay
    same = all(base == recipe.lr for base in schedule.base_lrs)
    if same and (schedule.T_max, schedule.last_epoch) == (total, done):
        return
    schedule.T_max, schedule.last_epoch = total, done
    schedule.base_lrs = [recipe.lr for _ in optimizer.param_groups]
    rate = cosine_rate(recipe.lr, done, total)
    for group in optimizer.param_groups:
        group["initial_lr"] = recipe.lr
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
