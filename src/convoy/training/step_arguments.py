"""The arguments of `training_step`, looked at before any work is done for them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

from convoy.capture.batch import flatten_batch
from convoy.capture.loss_module import LossModule
from convoy.capture.step_tensors import StepTensors
from convoy.errors import CaptureError, InputError
from convoy.narrowing import is_sequence
from convoy.training.allreduce.bf16_allreduce import BF16_ERROR_FEEDBACK
from convoy.training.allreduce.gathered_factors import FACTORS
from convoy.training.allreduce.sent_gradients import GRADIENTS
from convoy.training.step import check_not_empty
from convoy.training.step_program import StepOptions


def check_training_arguments(
    model: Any,
    loss_fn: Callable[..., torch.Tensor],
    optimizer: Any,
    batch: Any,
    options: StepOptions,
) -> None:
    """Refuse what no training step can be made of.

    Raises:
        InputError: names the argument.
    """
    if not isinstance(model, nn.Module):
        raise InputError("model", type(model).__name__, "a torch.nn.Module")
    if not callable(loss_fn):
        raise InputError("loss_fn", loss_fn, "a function (output, *targets) that returns one number")
    if not is_sequence(batch) or len(batch) < 1:
        raise InputError("batch", type(batch).__name__, "a tuple (x, *targets)")
    check_not_empty(flatten_batch(tuple(batch)))
    _check_options(options)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise InputError("model", type(model).__name__, "a model with a parameter that requires a gradient")
    _check_optimizer(LossModule(model, loss_fn, None, scaled=False), optimizer)


def _check_options(options: StepOptions) -> None:
    # Users may pass anything.
    accumulate, norm, scaler = (cast("Any", v) for v in (options.accumulate, options.clip_grad_norm, options.scaler))
    if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
        raise InputError("accumulate", accumulate, "an integer of at least 1")
    if norm is not None and (isinstance(norm, bool) or not isinstance(norm, (int, float)) or not norm > 0):
        raise InputError("clip_grad_norm", norm, "a positive number, or None")
    if options.amp not in (None, torch.float16, torch.bfloat16):
        raise InputError("amp", options.amp, "torch.bfloat16, torch.float16 or None")
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise InputError("scaler", type(scaler).__name__, "a torch.amp.GradScaler, or None")
    if options.gradients not in (None, *GRADIENTS):
        raise InputError("gradients", options.gradients, f"{' or '.join(map(repr, GRADIENTS))}, or None")
    if options.gradients == FACTORS and accumulate > 1:
        todo = "Accumulated gradients are no products of one batch: use gradients='bf16', or accumulate=1."
        raise InputError("gradients", options.gradients, "gradients of one batch (accumulate=1)", todo)
    if options.gradients == BF16_ERROR_FEEDBACK and scaler is not None:
        todo = "Use amp=torch.bfloat16, which needs no scaler, or gradients='bf16'."
        raise InputError(
            "gradients", options.gradients, "gradients that no scaler scales, step by step another way", todo
        )


def _check_optimizer(module: LossModule, optimizer: Any) -> None:
    """Refuse an optimizer that needs a closure, or that updates nothing of this model and its loss.

    One that holds some of their parameters is PyTorch's business: the others get gradients and stay as they are.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InputError("optimizer", type(optimizer).__name__, "a torch.optim.Optimizer")
    if needs_closure(optimizer):
        raise InputError(
            "optimizer",
            type(optimizer).__name__,
            "an optimizer whose step() needs no closure",
            "It computes the loss several times in a step: use PyTorch's own loop.",
        )
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    learning = StepTensors(module).learning
    if not any(id(parameter) in held for parameter in learning.values()):
        shown = ", ".join(list(learning)[:3]) + (", ..." if len(learning) > 3 else "")
        raise InputError(
            "optimizer",
            f"{type(optimizer).__name__} over {len(held)} parameters",
            f"one that holds parameters of this model that require a gradient ({shown}); it holds none of them",
            "Make the optimizer of this model's parameters, after the model was copied or moved.",
        )


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `optimizer.step()` cannot be called without an argument, as LBFGS's."""
    try:
        inspect.signature(type(optimizer).step).bind(optimizer)  # a scheduler puts a wrapper in the object's place
    except TypeError:
        return True
    except ValueError:  # it has no signature
        return False
    return False


def check_scalar_devices(model: nn.Module, batch: tuple[Any, ...]) -> None:
    """Refuse to capture tensors of no dimension on another device than the model's, which PyTorch takes for numbers."""
    device = next(model.parameters()).device
    if any(tensor.dim() == 0 and tensor.device != device for tensor in flatten_batch(batch).tensors):
        raise CaptureError(f"a number of the batch is a tensor on another device than the model's, {device}")
