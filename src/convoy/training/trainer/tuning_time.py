"""How long the step of a training may be tuned: a share of the time that the training itself takes."""

from __future__ import annotations

import dataclasses
import math
import time
from typing import Any, Final

import torch
from torch import nn

from convoy.errors import CaptureError
from convoy.pipeline.isolation import isolate, preserve_global_state
from convoy.settings import Effort, Settings
from convoy.training.trainer.processes import process_count
from convoy.typed_torch import process_group, unwrapped

SHARE: Final = 0.1
"""Of the training's time: tuning GoogLeNet's step without a limit took six minutes on two cores, a training of one epoch 80 s."""

LEAST_S: Final = 10.0
"""Seconds that tuning may take however short the training is: on most machines enough for a first answer."""

PASSES: Final = 3.0
"""A step's time in forward passes: of each layer's three products, two are the backward pass's."""


def with_tuning_time(
    settings: Settings, model: nn.Module, x: torch.Tensor, steps: int, amp: torch.dtype | None
) -> Settings:
    """The settings with a limit on the time of tuning, unless they have one or ask for effort none or full.

    The training's time is estimated from two forward passes of a copy of the model. Several processes take the estimate of the
    first one.

    Args:
        settings: those that the user gave.
        model: the model, maybe inside DistributedDataParallel.
        x: images of one batch, on the model's device.
        steps: number of steps of the training.
        amp: dtype of autocast, or None.
    """
    if settings.time_s < math.inf or settings.effort is not Effort.QUICK:
        return settings
    try:
        step_s = PASSES * _forward_s(unwrapped(model), x, amp)
    except CaptureError:  # the model cannot be copied: tuning falls back as well, with that reason
        return settings
    return dataclasses.replace(settings, time_s=max(LEAST_S, SHARE * steps * _of_first_process(step_s, model)))


def _forward_s(model: nn.Module, x: torch.Tensor, amp: torch.dtype | None) -> float:
    """Seconds of the second of two forward passes of a copy, in evaluation mode."""
    seconds = 0.0
    with preserve_global_state(), torch.no_grad(), torch.autocast(x.device.type, amp, enabled=amp is not None):
        copy = isolate(model, (x,), {})
        for _ in range(2):
            begun = time.perf_counter()
            copy.model(*copy.args)
            if x.device.type == "cuda":
                torch.cuda.synchronize(x.device)
            seconds = time.perf_counter() - begun
    return seconds


def _of_first_process(seconds: float, model: nn.Module) -> float:
    """The first process's value: all must stop tuning together."""
    if process_count() == 1 or process_group(model) is None:
        return seconds
    held: list[Any] = [seconds]
    torch.distributed.broadcast_object_list(held, 0, group=process_group(model))
    return float(held[0])
