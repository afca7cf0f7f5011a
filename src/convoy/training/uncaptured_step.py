"""PyTorch's own step, for what cannot be captured."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from convoy.capture.batch import flatten_batch
from convoy.pipeline.optimize_result import NO_GRAPH
from convoy.pipeline.plan_target import target_for
from convoy.plan import Plan
from convoy.training.step import TrainingStep
from convoy.training.step_program import StepOptions, StepProgram
from convoy.typed_torch import process_group, unwrapped


def uncaptured_step(
    model: nn.Module,
    loss_fn: Callable[..., torch.Tensor],
    optimizer: torch.optim.Optimizer,
    batch: tuple[Any, ...],
    options: StepOptions,
    name: str,
    note: str,
) -> TrainingStep:
    """PyTorch's own step, for what could not be captured; its plan has no steps, and `note` among its notes."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        options = dataclasses.replace(options, group=process_group(model))
        model = unwrapped(model)
    flat = flatten_batch(tuple(batch))
    device = next(model.parameters()).device.type
    target = target_for(device if device == "cuda" else "cpu").to_dict()
    plan = Plan(
        model=name or type(model).__name__, graph_digest=NO_GRAPH, inputs=(), target=target, numerics="as_torch", steps=(),
        solver="baseline", baseline=True, notes=(note,),
    )  # fmt: skip
    return TrainingStep(model, loss_fn, optimizer, options, StepProgram(plan, None, None, flat.signature))
