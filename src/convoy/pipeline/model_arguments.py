"""The arguments of `optimize` and `load`: refused by name where they are of a kind that cannot be used."""

from __future__ import annotations

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
        if isinstance(given, torch.export.ExportedProgram):
            todo = "Give the program's .module()."
        raise InputError("model", what, "a torch.nn.Module", todo)
    if isinstance(model, OptimizedModule):
        return model.stock
    if not hasattr(model, "training"):
        todo = "Give the module before torch.jit.freeze or torch.jit.optimize_for_inference."
        raise InputError("model", type(model).__name__, "a torch.nn.Module with a training flag", todo)
    compiled = getattr(model, "_orig_mod", None)
    return compiled if isinstance(compiled, nn.Module) else model


def checked_name(name: Any, model: nn.Module) -> str:
    """What to call a model: its class's name where none is given.

    Raises:
        InputError: no string.
    """
    if not isinstance(name, str):
        raise InputError("name", name, "a string")
    return name or type(model).__name__
