"""The arguments of `optimize` and `load`: refused by name where they are of a kind that cannot be used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn

from convoy.errors import InputError
from convoy.program import OptimizedModule


def checked_model(model: Any) -> nn.Module:
    """The module to be tuned: inside `torch.compile`'s wrapper or one of our own, the user's.

    Raises:
        InputError: not a module.
    """
    if isinstance(model, str):
        raise InputError("model", model, "a torch.nn.Module", "Load it first, e.g. torchvision.models.get_model(name).")
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise InputError("model", model.__name__, "a torch.nn.Module, not its class", "Make an instance of it.")
    if not isinstance(model, nn.Module):
        given = cast("Any", model)
        what = str(getattr(given, "__name__", None) or type(given).__name__)
        todo = "Put the function into a module's forward." if callable(given) else ""
        raise InputError("model", what, "a torch.nn.Module", todo)
    if isinstance(model, OptimizedModule):
        return model.model
    compiled = getattr(model, "_orig_mod", None)
    return compiled if isinstance(compiled, nn.Module) else model


def checked_arguments(args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments as a tuple and a dict of their own; one tensor stands for a tuple of it.

    Raises:
        InputError: neither.
    """
    if isinstance(args, torch.Tensor):
        given: tuple[Any, ...] = (args,)
    elif isinstance(args, (tuple, list)):
        given = tuple(cast("Sequence[Any]", args))
    else:
        raise InputError("args", args, "a tuple of the model's arguments, or one tensor", "Pass (x,).")
    named: dict[Any, Any] | None = cast("Any", kwargs) if isinstance(kwargs, dict) or kwargs is None else {None: kwargs}
    if named is not None and not all(isinstance(name, str) for name in named):
        raise InputError("kwargs", cast("object", kwargs), "a dict of keyword arguments by name, or None")
    return given, dict(named or {})


def checked_name(name: Any, model: nn.Module) -> str:
    """What to call a model: its class's name where none is given.

    Raises:
        InputError: no string.
    """
    if not isinstance(name, str):
        raise InputError("name", name, "a string")
    return name or type(model).__name__
