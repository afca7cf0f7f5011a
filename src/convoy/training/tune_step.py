"""training_step: from a model, its loss and its optimizer to a step that computes the same sooner, or to the stock one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch import nn

from convoy import plan as plans
from convoy.deadline import Deadline
from convoy.errors import CaptureError, InputError, SelectionError
from convoy.measurement.device.cudnn_search import cudnn_search
from convoy.pipeline.ceilings import is_brief
from convoy.pipeline.isolation import preserve_global_state
from convoy.pipeline.observer import Observer
from convoy.pipeline.profile_output import profiled
from convoy.pipeline.tune_in_time import overrun_note
from convoy.plan import Plan
from convoy.program.cuda.recording import first_line
from convoy.progress import shown
from convoy.settings import Effort, Settings, checked_settings
from convoy.training.batch_form import ordered
from convoy.training.plan_agreement import agree_on_plan, measured_share, take_shares
from convoy.training.step import TrainingStep, effective_amp
from convoy.training.step_arguments import check_training_arguments
from convoy.training.step_program import StepOptions
from convoy.training.training_job import TrainingJob
from convoy.training.training_result import TrainingResult
from convoy.training.uncaptured_step import uncaptured_step
from convoy.typed_torch import process_group, unwrapped
from convoy.user_warning import warn_user

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
    gradients: Literal["bf16", "bf16_error_feedback", "factors"] | None = None,
    plan: str | Path | None = None,
    settings: Settings | None = None,
    name: str = "",
) -> TrainingStep:
    """Make a function that trains a model on a batch: forward pass, loss, backward pass and update in one call.

    The gradients are those of PyTorch up to rounding; the update is the optimizer's own. On a GPU the whole step becomes one
    CUDA graph. A step that cannot be captured runs as PyTorch runs it, with a warning that says why.

    Args:
        model: any module, or one inside DistributedDataParallel: then gradients are averaged over its process group, and all
            processes run one plan. Parameters stay its own; its training flags are those of this moment.
        loss_fn: (output, *targets) → one number, such as `torch.nn.functional.cross_entropy`. It may be a module, and may hold
            tensors, which every step reads anew. Its parameters get gradients; the optimizer updates those that it was given.
        optimizer: over parameters of the model or of the loss; one that needs no closure.
        batch: an example, (x, *targets). x may be a tuple, given as `model(*x)`, or a dictionary, given as `model(**x)`, where
            the model's forward takes them so. Shapes, dtypes, memory format, and entries that are no tensors, are tuned for.
        amp: run under autocast with this dtype (bf16 or fp16).
        scaler: a `torch.amp.GradScaler`, for fp16.
        clip_grad_norm: scale gradients down to this joint L2 norm before the update.
        accumulate: calls to an update; each adds its gradients divided by this number.
        gradients: how a DistributedDataParallel averages gradients; None: by all-reduces of them. `"factors"`: processes gather
            the inputs and output gradients of linear layers and multiply these, where that is faster; needs `accumulate=1`.
            `"bf16"`: fp32 gradients are sent rounded to bf16, as `bf16_compress_hook` does. `"bf16_error_feedback"`: also summed
            in fp32, and what rounding dropped is added to the next step's gradients; that takes as much memory as the gradients.
        plan: replay this saved plan and measure nothing.
        settings: what may be done; `Settings()` by default.
        name: what to call the model in plans and reports.

    Returns:
        `step`, called as `loss = step(x, y)`; with `plan`, `notes`, `explain()`, `save(path)` and `release()`. Several inputs may
        be a tuple or a dictionary, whichever the example was, and targets may have the names of the loss function's parameters:
        `step(x, target=y)`.

    Raises:
        InputError: arguments that cannot be used.
        PlanError: `plan` is of another model, shape or machine.
        SelectionError: with `deterministic`, an operator has no right and deterministic implementation.
    """
    options = StepOptions(amp, scaler, clip_grad_norm, accumulate, gradients=gradients)
    return observed_training_step(
        model, loss_fn, optimizer, batch, options=options, plan=plan, settings=checked_settings(settings), name=name
    )


def observed_training_step(
    model: nn.Module,
    loss_fn: Callable[..., torch.Tensor],
    optimizer: torch.optim.Optimizer,
    batch: tuple[Any, ...],
    *,
    options: StepOptions,
    plan: str | Path | None = None,
    settings: Settings,
    name: str = "",
    observer: Observer | None = None,
) -> TrainingStep:
    """`training_step` with its options as one value; `observer` is told of the progress."""
    try:
        return tune_training_step(
            model,
            loss_fn,
            optimizer,
            batch,
            options=options,
            plan=plan,
            settings=settings,
            name=name,
            observer=observer,
        ).step
    except CaptureError as error:
        reason = str(error)
    except (InputError, SelectionError):
        raise
    except Exception as error:  # everything: tuning runs compilers, kernels and the user's code on copies
        if isinstance(model, nn.parallel.DistributedDataParallel):  # the other processes may have gone on
            raise
        reason = f"tuning failed, with {type(error).__name__}: {first_line(error)}"
    warn_user(f"{reason}: PyTorch's own step runs")
    return uncaptured_step(model, loss_fn, optimizer, batch, options, name, reason)


def tune_training_step(
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
    deadline: Deadline | None = None,
) -> TrainingResult:
    """`training_step` with all results of tuning.

    Args:
        model: as for `training_step`.
        loss_fn: as for `training_step`.
        optimizer: as for `training_step`.
        batch: as for `training_step`.
        options: autocast, scaler, clipping, accumulation.
        plan: as for `training_step`.
        settings: as for `training_step`.
        name: as for `training_step`.
        observer: called with the progress.
        deadline: as for `optimize_model`.
    """
    deadline = deadline or Deadline(settings.time_s)
    options = options or StepOptions()
    check_training_arguments(model, loss_fn, optimizer, batch, options)
    device = next(model.parameters()).device
    if device.type not in ("cpu", "cuda"):
        raise CaptureError(f"the model is on {device.type}; expected cpu or cuda")
    amp = effective_amp(options.amp, device)
    with (
        shown(settings.progress and observer is None) as watch,
        preserve_global_state(),  # copies are run and numbers are drawn, which training must not notice
        profiled(settings) as recorder,
        cudnn_search(device.type, allowed=not is_brief(settings.effort, deadline)),
        torch.inference_mode(False),
        torch.autocast(device.type, enabled=False),
    ):
        found = _tune_or_replay(
            model, loss_fn, optimizer, tuple(batch), options, amp, plan, settings, name, observer or watch, deadline
        )
    late = overrun_note(deadline, found.measured)
    if late:
        warn_user(late)
    return dataclasses.replace(found, profile=recorder.profile())


def _tune_or_replay(
    model: nn.Module,
    loss_fn: Callable[..., torch.Tensor],
    optimizer: torch.optim.Optimizer,
    batch: tuple[Any, ...],
    options: StepOptions,
    amp: torch.dtype | None,
    plan: str | Path | None,
    settings: Settings,
    name: str,
    watch: Observer,
    deadline: Deadline,
) -> TrainingResult:
    """Tune a step, or replay a plan. Several processes agree on one plan, which the first one selects."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        options = dataclasses.replace(options, group=process_group(model))
        model = unwrapped(model)
    if isinstance(model, torch._dynamo.OptimizedModule):  # what it compiled is captured as a whole here
        model = model._orig_mod
    batch = ordered(model, batch)
    replayed = plans.load(Path(plan)) if plan is not None else None
    job = TrainingJob(model, loss_fn, optimizer, batch, options, amp, settings, name or type(model).__name__, replayed)
    if options.group is not None and replayed is None:
        found: list[TrainingResult] = []

        def tune(shares: list[bytes]) -> Plan:
            take_shares(settings, shares)
            found.append(job.tune(watch, deadline))
            return found[0].plan

        shared = job.target.device in SHARED_DEVICES and settings.effort is not Effort.NONE
        measure_share = partial(measured_share, job.net, settings, watch, deadline)
        agreed = agree_on_plan(tune, options.group, job.target, measure_share if shared else None)
        return found[0] if found else job.replay(agreed)
    return job.tune(watch, deadline) if replayed is None else job.replay(replayed)
