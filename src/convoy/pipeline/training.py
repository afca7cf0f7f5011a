"""training_step: from a model, its loss and its optimizer to a step that computes the same sooner, or to the stock one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from convoy import plan as plans
from convoy.errors import InputError
from convoy.pipeline.agreement import agree
from convoy.pipeline.stages import Observer, silent
from convoy.pipeline.training_job import TrainingJob, TrainingResult
from convoy.plan import Plan
from convoy.program.step import TrainingStep
from convoy.program.step_program import StepOptions
from convoy.settings import Effort, Settings

SHARED_DEVICES: Final = ("cuda",)
"""Devices of which each process has its own, so that processes measure in shares; on a CPU they would do so on the same cores."""


def training_step(
    model: nn.Module,
    loss_fn: Callable[..., torch.Tensor],
    optimizer: torch.optim.Optimizer,
    batch: tuple[Any, ...],
    *,
    amp: torch.dtype | None = None,
    scaler: torch.amp.GradScaler | None = None,
    clip_grad_norm: float | None = None,
    accumulate: int = 1,
    plan: str | Path | None = None,
    settings: Settings | None = None,
    name: str = "",
) -> TrainingStep:
    """Make a function that trains a model on a batch: forward pass, loss, backward pass and update in one call.

    The gradients are those of PyTorch up to rounding; the update is the optimizer's own. On a GPU the whole step becomes one
    CUDA graph.

    Args:
        model: any module, or one inside DistributedDataParallel: then gradients are averaged over its process group, and all
            processes run one plan. Parameters stay its own; its training flags are those of this moment.
        loss_fn: (output, *targets) → one number, such as `torch.nn.functional.cross_entropy`.
        optimizer: over the model's parameters; one that needs no closure.
        batch: an example, (x, *targets); x may be a tuple. Its shapes, dtypes and memory format are tuned for.
        amp: run under autocast with this dtype (bf16 or fp16).
        scaler: a `torch.amp.GradScaler`, for fp16.
        clip_grad_norm: scale gradients down to this joint L2 norm before the update.
        accumulate: calls to an update; each adds its gradients divided by this number.
        plan: replay this saved plan and measure nothing.
        settings: what may be done; `Settings()` by default.
        name: what to call the model in plans and reports.

    Returns:
        `step`, called as `loss = step(x, y)`; with `plan`, `notes`, `explain()`, `save(path)` and `release()`.

    Raises:
        InputError: arguments that cannot be used.
        CaptureError: the model or its loss cannot be traced.
        PlanError: `plan` is of another model, shape or machine.
        SelectionError: nothing satisfies the settings: with `deterministic`, an operator that nothing computes with the same bits
            in every run, or gradients that are wrong as planned where PyTorch's own may differ from run to run.
    """
    return train_model(
        model,
        loss_fn,
        optimizer,
        batch,
        options=StepOptions(amp, scaler, clip_grad_norm, accumulate),
        plan=plan,
        settings=settings or Settings(),
        name=name,
    ).step


def train_model(
    model: nn.Module,
    loss_fn: Callable[..., torch.Tensor],
    optimizer: torch.optim.Optimizer,
    batch: tuple[Any, ...],
    *,
    options: StepOptions | None = None,
    plan: str | Path | None = None,
    settings: Settings,
    name: str = "",
    observer: Observer | None = None,
) -> TrainingResult:
    """`training_step`, with everything that was found out; `observer` is told of the progress."""
    options = options or StepOptions()
    _check_arguments(model, batch, options)
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):  # tuning draws numbers, which training must not notice
        return _train_model(model, loss_fn, optimizer, batch, options, plan, settings, name, observer)


def _train_model(
    model: nn.Module,
    loss_fn: Callable[..., torch.Tensor],
    optimizer: torch.optim.Optimizer,
    batch: tuple[Any, ...],
    options: StepOptions,
    plan: str | Path | None,
    settings: Settings,
    name: str,
    observer: Observer | None,
) -> TrainingResult:
    if isinstance(model, nn.parallel.DistributedDataParallel):
        options = dataclasses.replace(options, group=model.process_group)
        model = model.module
    replayed = plans.load(Path(plan)) if plan is not None else None
    job = TrainingJob(model, loss_fn, optimizer, batch, options, settings, name or type(model).__name__, replayed)
    if options.group is not None and replayed is None:
        found: list[TrainingResult] = []

        def tune(shares: list[bytes]) -> Plan:
            job.take(shares)
            found.append(job.tune(observer))
            return found[0].plan

        shared = job.target.device in SHARED_DEVICES and settings.effort is not Effort.NONE
        measure_share = partial(job.measure_share, observer or silent)
        agreed = agree(tune, options.group, job.target, measure_share if shared else None)
        return found[0] if found else job.replay(agreed)
    return job.tune(observer) if replayed is None else job.replay(replayed)


def _check_arguments(model: nn.Module, batch: tuple[Any, ...], options: StepOptions) -> None:
    if not isinstance(batch, tuple) or len(batch) < 1:
        raise InputError("batch", type(batch).__name__, "a tuple (x, *targets)")
    if options.accumulate < 1:
        raise InputError("accumulate", options.accumulate, "an integer of at least 1")
    if options.clip_grad_norm is not None and not options.clip_grad_norm > 0:
        raise InputError("clip_grad_norm", options.clip_grad_norm, "a positive number, or None")
    if options.amp not in (None, torch.float16, torch.bfloat16):
        raise InputError("amp", options.amp, "torch.bfloat16, torch.float16 or None")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise InputError("model", type(model).__name__, "a model with a parameter that requires a gradient")
