"""LossModule: a model and its loss as one module, and how a batch's first entry becomes the model's arguments."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn

from convoy.errors import InputError
from convoy.narrowing import is_list, is_mapping, is_tuple


class LossModule(nn.Module):
    """A model and its loss as one module: (x, *targets) → the loss, under autocast where it was asked for.

    Args:
        model: called with x as `call_model` says.
        loss_fn: (the model's output, *targets) → one number. Where it is a module, its parameters and buffers are this module's.
        amp: dtype of autocast, or None.
        scaled: whether the last argument of a call is a factor for the loss, as a gradient scaler wants it.
    """

    def __init__(
        self, model: nn.Module, loss_fn: Callable[..., torch.Tensor], amp: torch.dtype | None, *, scaled: bool
    ) -> None:
        super().__init__()
        self.model, self.loss_fn, self.amp, self.scaled = model, loss_fn, amp, scaled

    def rebuilt(self, copied: Callable[[nn.Module], nn.Module]) -> LossModule:
        """The same around a copy of the model, and of the loss where it is a module; a loss that is a function stays as it is.

        Args:
            copied: copies a module; model and loss are copied together, for they may share parts.
        """
        modules = [part for part in (self.model, self.loss_fn) if isinstance(part, nn.Module)]
        parts = copied(nn.ModuleList(modules))
        assert isinstance(parts, nn.ModuleList)
        loss_fn = parts[1] if len(modules) > 1 else self.loss_fn
        return LossModule(parts[0], loss_fn, self.amp, scaled=self.scaled)

    def forward(self, x: Any, *rest: Any) -> tuple[torch.Tensor, ...]:
        """The loss to derive, and where it is scaled the loss itself.

        Raises:
            InputError: `loss_fn` returned no tensor, or one of several elements.
        """
        targets, scale = (rest[:-1], rest[-1]) if self.scaled else (rest, None)
        device = next((t.device.type for t in self.model.parameters()), "cpu")
        context = torch.autocast(device, self.amp) if self.amp is not None else contextlib.nullcontext()
        with context:
            loss = cast("object", self.loss_fn(call_model(self.model, x), *targets))
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise InputError("loss_fn", shape, "one number: a tensor of one element", "Reduce it, with .mean() say.")
        return (loss,) if scale is None else (loss * scale, loss.detach())


def call_model(model: nn.Module, x: Any) -> Any:
    """Call a model with a batch's first entry, as `model_arguments` says."""
    args, kwargs = model_arguments(model, x)
    return model(*args, **kwargs)


def model_arguments(model: nn.Module, x: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """The arguments, by position and by keyword, that a batch's first entry stands for.

    A tuple is `model(*x)` and a mapping `model(**x)`, where the signature of `model.forward` takes them so, else `model(x)`.
    A list, which is what PyTorch's collate function makes of tuples, is `model(x)` where that is possible, else `model(*x)`.
    """
    if is_tuple(x) and _takes(model, x, {}):
        return x, {}
    if is_mapping(x) and all(isinstance(key, str) for key in x) and _takes(model, (), x):
        return (), x
    if is_list(x) and not _takes(model, (x,), {}):
        return x, {}
    return (x,), {}


def _takes(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a model's forward can be called so; one without a signature takes anything but keywords."""
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError:
        return False
    except ValueError:
        return not kwargs
    return True
